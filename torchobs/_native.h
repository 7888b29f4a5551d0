/* What the parts of torchobs._native share: _native.c writes records, _native_hooks.c has the hooks, _native_signals.c the ends
 * by a signal. */

#ifndef TORCHOBS_NATIVE_H
#define TORCHOBS_NATIVE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <limits.h>
#include <stdint.h>

enum { BOUNDARIES = 5 };

/* Of a plain step: the arguments of FlightWriter.append_plain. */
typedef struct {
    uint64_t stamps[BOUNDARIES];
    uint64_t step, end_ns, begun_ns, flags, losses, tokens, samples;
    double loss, grad_norm, learning_rate;
    float norm_scale;
} Step;

/* As PyLong_AsUnsignedLongLong, which takes a large number byte by byte: 100 instructions more (CPython 3.11), a dozen times a step. */
static inline uint64_t as_uint64(PyObject *object)
{
#if ULONG_MAX == UINT64_MAX
    return PyLong_AsUnsignedLong(object);
#else
    return PyLong_AsUnsignedLongLong(object);
#endif
}

/* Values from Python's: 1, or 0 without an exception where the reference has to look. */
int to_unsigned(PyObject *object, uint64_t most, uint64_t *value);
int to_double(PyObject *object, double *value);
int to_float(PyObject *object, float *value);
/* 1: a plain step's boundaries; 0: others; -1: the reference has to look. */
int to_stamps(PyObject *boundaries, uint64_t *stamps);

typedef struct PlainSteps PlainSteps;
PlainSteps *as_plain_steps(PyObject *object); /* borrowed; NULL, without an exception, for anything else */
int append_step(PlainSteps *self, const Step *step); /* 0, or -1 with an exception */

uint64_t monotonic_ns(void);
int stamp(PyObject *trace, uint64_t code); /* appends `monotonic_ns() << 4 | code` to the list; 0, or -1 with an exception */

PyObject *call_with(PyObject *function, PyObject *const *args, Py_ssize_t count);
int add_type(PyObject *module, const char *name, PyType_Spec *spec);
int add_hooks(PyObject *module);
int add_signals(PyObject *module);
/* Memory of a Map; NULL, with an exception, for anything else, or outside of it. */
unsigned char *in_map(PyObject *map, size_t offset, size_t size);

#endif
