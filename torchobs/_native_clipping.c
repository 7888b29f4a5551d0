/* Clipping by norm, torchobs.probes.gradients.clipping, as far as nothing is to be measured: the total norm of the only
 * optimizer's gradients, on the CPU, and whether it was over the limit. The rest is the reference's, as in _native_hooks.c.
 */

#include "_native_hook.h"

#include <math.h>

/* Below, squares may have been lost: torchobs.probes.gradients.clipping._SUSPICIOUS */
static const double suspicious = 1e-15;

/* -- PlainTotalNorm: get_total_norm ----------------------------------------------------------------------------------- */

enum {
    TOTAL_VALUES, TOTAL_SOLE, TOTAL_STEP, TOTAL_SEEN, TOTAL_NOTED, TOTAL_NOTED_IN, TOTAL_COVERED, TOTAL_COVERED_GRADS,
    TOTAL_COVERED_UNTIL, TOTAL_EACH_NS, TOTAL_UNSCALE, TOTAL_IS_OPEN, TOTAL_DUE_AT, TOTAL_DUE, TOTAL_FIXED,
};
enum { TOTAL_MODES, TOTAL_TENSOR, TOTAL_NOTE, TOTAL_ORIGINAL, TOTAL_ELSEWHERE };
static const Plan total_plan = {
    5, ".t...", TOTAL_VALUES,
    {
        {0, "values"}, {0, "sole"}, {0, "step"}, {1, "_seen"}, {1, "_noted"}, {1, "_noted_in"}, {1, "_covered"},
        {1, "_covered_grads"}, {1, "_covered_until"}, {1, "_each_ns"}, {2, "waits_for_unscale"}, {3, "is_open"},
        {4, "due_at"}, {4, "step"}, {4, "fixed"},
    },
};

static PyObject *total_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    return make_hook(type, args, named, &total_plan);
}

static int is_whole(const Hook *self, int slot)
{
    return PyLong_CheckExact(get(self, slot));
}

/* 1 or 0, also where one is no integer; -1 with an exception. */
static int compare(const Hook *self, int one, int operation, int other)
{
    return is_whole(self, one) && is_whole(self, other) ? PyObject_RichCompareBool(get(self, one), get(self, other), operation) : 0;
}

/* Whether each gradient's norm is asked for in this step: SamplingInterval.would_be_due, and at least so long after the last.
 * Also where it cannot be told. */
static int is_due(const Hook *self)
{
    uint64_t each_ns;
    if (!is_whole(self, TOTAL_STEP) || !is_whole(self, TOTAL_DUE_AT) || !is_whole(self, TOTAL_DUE))
        return 1;
    int before = compare(self, TOTAL_STEP, Py_LT, TOTAL_DUE_AT), another = compare(self, TOTAL_STEP, Py_NE, TOTAL_DUE);
    if (before < 0 || another < 0)
        return -1;
    if (before && another)
        return 0;
    return get(self, TOTAL_FIXED) != Py_None || !to_unsigned(get(self, TOTAL_EACH_NS), UINT64_MAX, &each_ns)
        || monotonic_ns() >= each_ns;
}

/* 1, or 0 where the reference has to look, with nothing changed; -1. */
static int total_is_plain(const Hook *self, PyObject *args)
{
    double norm_type;
    if (PyTuple_Size(args) < 2 || !is_false(self, TOTAL_IS_OPEN))
        return 0;
    PyObject *gradients = PyTuple_GetItem(args, 0), *kind = PyTuple_GetItem(args, 1);
    if (!PyList_CheckExact(gradients) || PyList_Size(gradients) == 0 || !PyFloat_CheckExact(kind) || !to_double(kind, &norm_type)
        || norm_type != 2.0)
        return 0;
    int traced = says_yes(self->held[TOTAL_MODES]);
    if (traced)
        return traced < 0 ? -1 : 0;
    int due = is_due(self);
    return due < 0 ? -1 : !due;
}

/* ClipWatch._is_trusted, but for the norm itself: as above. */
static int is_trusted(const Hook *self, PyObject *gradients)
{
    uint64_t grads, sole;
    if (!is_false(self, TOTAL_IS_OPEN) || !is_false(self, TOTAL_UNSCALE) || !PyList_CheckExact(get(self, TOTAL_SEEN))
        || PyList_Size(get(self, TOTAL_SEEN)) || !to_unsigned(get(self, TOTAL_SOLE), UINT64_MAX, &sole) || sole == 0
        || !to_unsigned(get(self, TOTAL_COVERED_GRADS), UINT64_MAX, &grads) || grads != (uint64_t)PyList_Size(gradients))
        return 0;
    int same = compare(self, TOTAL_COVERED, Py_EQ, TOTAL_SOLE);
    return same <= 0 ? same : compare(self, TOTAL_STEP, Py_LT, TOTAL_COVERED_UNTIL);
}

/* Adds the norm to the values of the step in progress: 1; 0 where the reference has to; -1. */
static int add_norm(Hook *self, PyObject *number)
{
    PyObject *values = get(self, TOTAL_VALUES), *step = get(self, TOTAL_STEP);
    double norm, base;
    uint64_t flags;
    if (Py_TYPE(values) != self->values_type || !PyFloat_CheckExact(number) || !to_double(number, &norm)
        || !(suspicious < norm && norm < INFINITY) || !to_double(value_of(self, values, NORM_BASE), &base)
        || !to_unsigned(value_of(self, values, FLAGS), UINT16_MAX, &flags))
        return 0;
    PyObject *squared = PyFloat_FromDouble(base + norm * norm), *scale = PyFloat_FromDouble(1.0);
    PyObject *flagged = PyLong_FromUnsignedLongLong(flags | FLAG_GRAD_NORM);
    if (squared == NULL || scale == NULL || flagged == NULL) {
        Py_XDECREF(squared);
        Py_XDECREF(scale);
        Py_XDECREF(flagged);
        return -1;
    }
    Py_INCREF(values); /* what an attribute held may have a __del__ of its own */
    Py_INCREF(number);
    Py_INCREF(step);
    set(self->slots[TOTAL_NOTED], number);
    set(self->slots[TOTAL_NOTED_IN], step);
    set(field(self, values, NORM_SQUARED), squared);
    set(field(self, values, NORM_SCALE), scale);
    set(field(self, values, FLAGS), flagged);
    Py_DECREF(values);
    return 1;
}

/* As add_norm, of what torch has returned. */
static int note_norm(Hook *self, PyObject *gradients, PyObject *norm)
{
    int trusted = (PyObject *)Py_TYPE(norm) == self->held[TOTAL_TENSOR] ? is_trusted(self, gradients) : 0;
    if (trusted <= 0)
        return trusted;
    PyObject *on_cpu = PyObject_GetAttr(norm, self->names[IS_CPU]);
    if (on_cpu == NULL)
        return -1;
    Py_DECREF(on_cpu);
    if (on_cpu != Py_True)
        return 0;
    PyObject *number = PyObject_CallMethodObjArgs(norm, self->names[ITEM], NULL);
    if (number == NULL)
        return -1;
    int added = add_norm(self, number);
    Py_DECREF(number);
    return added;
}

/* Returns the result of torch's function: after an exception that the breaker takes, and once `done`. Takes the references. */
static PyObject *result_after(PyObject *result, PyObject *done)
{
    if (done == NULL) {
        Py_DECREF(result);
        return NULL;
    }
    Py_DECREF(done);
    return result;
}

/* run(args, kwargs): call torch's function and record the norm; or nothing, and `elsewhere`. */
static PyObject *total_run(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    Hook *self = (Hook *)object;
    if (!are_run_arguments(args, count))
        return NULL;
    int plain = total_is_plain(self, args[0]);
    if (plain <= 0)
        return plain < 0 ? NULL : elsewhere(self, TOTAL_ELSEWHERE);
    PyObject *norm = PyObject_Call(self->held[TOTAL_ORIGINAL], args[0], args[1]);
    if (norm == NULL)
        return NULL;
    PyObject *gradients = PyTuple_GetItem(args[0], 0);
    int noted = note_norm(self, gradients, norm);
    if (noted < 0)
        return result_after(norm, taken(self->owners[3]));
    if (noted)
        return norm;
    return result_after(
        norm, PyObject_CallFunctionObjArgs(self->held[TOTAL_NOTE], gradients, PyTuple_GetItem(args[0], 1), norm, Py_None, NULL));
}

/* -- PlainClip: clip_grads_with_norm_ --------------------------------------------------------------------------------- */

enum { CLIP_VALUES, CLIP_LIMIT, CLIP_NOTED, CLIP_IS_OPEN };
enum { CLIP_MODES, CLIP_TENSOR, CLIP_NOTE, CLIP_ORIGINAL, CLIP_ELSEWHERE };
static const Plan clip_plan = {
    5, ".t...", CLIP_VALUES, {{0, "values"}, {1, "limit"}, {1, "_noted"}, {3, "is_open"}},
};

static PyObject *clip_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    return make_hook(type, args, named, &clip_plan);
}

/* As total_is_plain. */
static int clip_is_plain(const Hook *self, PyObject *args)
{
    if (PyTuple_Size(args) < 3 || !is_false(self, CLIP_IS_OPEN) || !PyFloat_CheckExact(PyTuple_GetItem(args, 1))
        || (PyObject *)Py_TYPE(PyTuple_GetItem(args, 2)) != self->held[CLIP_TENSOR])
        return 0;
    int traced = says_yes(self->held[CLIP_MODES]);
    return traced < 0 ? -1 : !traced;
}

/* 1: noted whether the norm was over the limit; 0 where the reference has to; -1. */
static int note_clip(Hook *self, PyObject *limit)
{
    PyObject *values = get(self, CLIP_VALUES), *noted = get(self, CLIP_NOTED), *flagged = NULL;
    double norm, most;
    uint64_t flags;
    if (!is_false(self, CLIP_IS_OPEN) || Py_TYPE(values) != self->values_type || !PyFloat_CheckExact(noted)
        || !to_double(noted, &norm) || !to_double(limit, &most) || !to_unsigned(value_of(self, values, FLAGS), UINT16_MAX, &flags))
        return 0;
    if (most < norm) {
        flagged = PyLong_FromUnsignedLongLong(flags | FLAG_CLIPPED);
        if (flagged == NULL)
            return -1;
    }
    Py_INCREF(values);
    Py_INCREF(limit);
    set(self->slots[CLIP_LIMIT], limit);
    Py_INCREF(Py_None);
    set(self->slots[CLIP_NOTED], Py_None);
    if (flagged != NULL)
        set(field(self, values, FLAGS), flagged);
    Py_DECREF(values);
    return 1;
}

/* run(args, kwargs): as total_run. */
static PyObject *clip_run(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    Hook *self = (Hook *)object;
    if (!are_run_arguments(args, count))
        return NULL;
    int plain = clip_is_plain(self, args[0]);
    if (plain <= 0)
        return plain < 0 ? NULL : elsewhere(self, CLIP_ELSEWHERE);
    PyObject *result = PyObject_Call(self->held[CLIP_ORIGINAL], args[0], args[1]);
    if (result == NULL)
        return NULL;
    PyObject *limit = PyTuple_GetItem(args[0], 1);
    int noted = note_clip(self, limit);
    if (noted < 0)
        return result_after(result, taken(self->owners[3]));
    if (noted)
        return result;
    return result_after(
        result, PyObject_CallFunctionObjArgs(self->held[CLIP_NOTE], limit, PyTuple_GetItem(args[0], 2), Py_None, NULL));
}

/* -- the types -------------------------------------------------------------------------------------------------------- */

static PyMethodDef total_methods[] = {
    {"run", FAST(total_run), "run(args, kwargs): call it and record the norm; or nothing, and `elsewhere`."},
    {NULL, NULL, 0, NULL},
};
static PyMethodDef clip_methods[] = {
    {"run", FAST(clip_run), "run(args, kwargs): call it and record whether it clipped; or nothing, and `elsewhere`."},
    {NULL, NULL, 0, NULL},
};

HOOK_TYPE("PlainTotalNorm", total);
HOOK_TYPE("PlainClip", clip);

int add_clipping(PyObject *module)
{
    return add_type(module, "PlainTotalNorm", &total_spec) < 0 || add_type(module, "PlainClip", &clip_spec) < 0 ? -1 : 0;
}
