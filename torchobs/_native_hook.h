/* What the hooks of _native_hooks.c are made of; _native_hook.c makes them. */

#ifndef TORCHOBS_NATIVE_HOOK_H
#define TORCHOBS_NATIVE_HOOK_H

#include "_native.h"

enum { MOST_OWNERS = 6, MOST_SLOTS = 20, MOST_HELD = 10 };

/* Attributes of StepValues, in every hook that has one. */
enum { FLAGS, LOSSES, TOKENS, SAMPLES, NUMBER, LOSS_SUM, NORM_SQUARED, LEARNING_RATE, NORM_BASE, NORM_SCALE, FIELDS };

/* torchobs.flight.step_record.StepFlag */
enum { FLAG_LOSS = 1, FLAG_GRAD_NORM = 2, FLAG_LEARNING_RATE = 4 };

/* Attributes and keys of torch's, interned. */
enum { IS_CPU, ITEM, NUMEL, INDEX_SAMPLER, PARAM_GROUPS, LR, NAMES };

/* What a hook is made of. */
typedef struct {
    int owners;
    const char *held; /* a letter for each: 'l' a list, 'd' a dict, 's' PlainSteps, 't' a type, '.' anything */
    int values; /* the slot that has a StepValues, or -1 */
    struct {
        int owner;
        const char *name;
    } slots[MOST_SLOTS + 1];
} Plan;

typedef struct {
    PyObject_HEAD
    PyObject **slots[MOST_SLOTS];
    PyObject *held[MOST_HELD];
    PyObject *owners[MOST_OWNERS];
    PyTypeObject *values_type;
    Py_ssize_t fields[FIELDS];
    PyObject *names[NAMES];
} Hook;

/* Borrowed, and None for one that is not set. */
static inline PyObject *get(const Hook *self, int slot)
{
    PyObject *value = *self->slots[slot];
    return value == NULL ? Py_None : value;
}

/* Takes the reference. */
static inline void set(PyObject **slot, PyObject *value)
{
    PyObject *old = *slot;
    *slot = value;
    Py_XDECREF(old);
}

static inline int set_small(PyObject **slot, long value)
{
    PyObject *made = PyLong_FromLong(value);
    if (made != NULL)
        set(slot, made);
    return made == NULL ? -1 : 0;
}

/* As `object.slot += operand` or `|=`. */
static inline int combine(PyObject **slot, binaryfunc operation, PyObject *operand)
{
    PyObject *value = *slot == NULL ? Py_None : *slot;
    Py_INCREF(value);
    PyObject *made = operation(value, operand);
    Py_DECREF(value);
    if (made == NULL)
        return -1;
    set(slot, made);
    return 0;
}

static inline int combine_small(PyObject **slot, binaryfunc operation, long operand)
{
    PyObject *number = PyLong_FromLong(operand);
    int failed = number == NULL ? -1 : combine(slot, operation, number);
    Py_XDECREF(number);
    return failed;
}

/* The value of a whole number of Python's that is not large; 0 for anything else. */
static inline int to_small(PyObject *object, long *value)
{
    int overflow = 1;
    *value = object != NULL && PyLong_CheckExact(object) ? PyLong_AsLongAndOverflow(object, &overflow) : 0;
    return !overflow && *value >= 0 && *value < INT32_MAX;
}

/* As `object.slot += 1`, `|= flag` and `+= number`: Python's operators take as long as all else here, where they are cold. */
static inline int add_one(PyObject **slot)
{
    long value;
    return to_small(*slot, &value) ? set_small(slot, value + 1) : combine_small(slot, PyNumber_InPlaceAdd, 1);
}

static inline int set_flag(PyObject **slot, long flag)
{
    long value;
    return to_small(*slot, &value) ? set_small(slot, value | flag) : combine_small(slot, PyNumber_InPlaceOr, flag);
}

static inline int add_double(PyObject **slot, PyObject *number, double value)
{
    if (*slot == NULL || !PyFloat_CheckExact(*slot))
        return combine(slot, PyNumber_InPlaceAdd, number);
    PyObject *sum = PyFloat_FromDouble(PyFloat_AsDouble(*slot) + value);
    if (sum == NULL)
        return -1;
    set(slot, sum);
    return 0;
}

static inline int is_false(const Hook *self, int slot)
{
    return *self->slots[slot] == Py_False;
}

static inline int is_small(const Hook *self, int slot, long value)
{
    PyObject *object = get(self, slot);
    int overflow;
    return PyLong_Check(object) && PyLong_AsLongAndOverflow(object, &overflow) == value && !overflow;
}

/* Whether it is that object's id. */
static inline int is_id(const Hook *self, int slot, const void *object)
{
    uint64_t id;
    return to_unsigned(get(self, slot), UINT64_MAX, &id) && id == (uint64_t)(uintptr_t)object;
}

static inline int is_this_thread(const Hook *self, int slot)
{
    uint64_t thread;
    return to_unsigned(get(self, slot), UINT64_MAX, &thread) && thread == (uint64_t)PyThread_get_thread_ident();
}

/* A field of the values of the step in progress, which are known to be of the type. */
static inline PyObject **field(const Hook *self, PyObject *values, int which)
{
    return (PyObject **)(void *)((char *)values + self->fields[which]);
}

/* Borrowed, as `get`. */
static inline PyObject *value_of(const Hook *self, PyObject *values, int which)
{
    PyObject *value = *field(self, values, which);
    return value == NULL ? Py_None : value;
}

/* What says that the reference has to. */
static inline PyObject *elsewhere(const Hook *self, int held)
{
    Py_INCREF(self->held[held]);
    return self->held[held];
}

/* For Py_tp_new, with the type's plan; Py_tp_traverse and Py_tp_dealloc. */
PyObject *make_hook(PyTypeObject *type, PyObject *args, PyObject *named, const Plan *plan);
int hook_traverse(PyObject *object, visitproc visit, void *arg);
void hook_dealloc(PyObject *object);

/* As the `except` of a hook in Python: None for an exception that its probe's breaker takes, or NULL with the exception. */
PyObject *taken(PyObject *breaker);
/* Whether a function of torch's without arguments returns what is true; -1 with an exception. */
int says_yes(PyObject *function);
/* The code of the trace's boundary at that index, or -1. */
int code_at(PyObject *trace, Py_ssize_t index);
/* Whether these are the arguments of a run(args, kwargs), else with an exception. */
int are_run_arguments(PyObject *const *args, Py_ssize_t count);

#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL

#define HOOK_TYPE(name, what)                                                                                                  \
    static PyType_Slot what##_slots[] = {                                                                                      \
        {Py_tp_new, what##_new}, {Py_tp_traverse, hook_traverse}, {Py_tp_dealloc, hook_dealloc},                               \
        {Py_tp_methods, what##_methods}, {0, NULL},                                                                            \
    };                                                                                                                         \
    static PyType_Spec what##_spec = {                                                                                         \
        "torchobs._native." name, sizeof(Hook), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, what##_slots,                      \
    }

#endif
