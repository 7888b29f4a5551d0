/* The hooks of a training step, as far as it is a plain one.
 *
 * Each type has what the hooks of one probe do in nearly every step. Whatever is not plain is left, with nothing changed, to
 * the same hook in Python: the reference. What they share with the rest of torchobs stays where it is, in `__slots__` of Python
 * objects, which a hook here reads and writes in place: an attribute by its name would take as long as Python's instructions.
 */

#include "_native_hook.h"

#include <math.h>

/* torchobs.probes.timeline */
enum { FETCH = 0, FETCHED = 1, EXHAUSTED = 3, BACKWARD_BEGINS = 5, BACKWARD_ENDS = 6, STEP_BEGINS = 7, LONG_TRACE = 4096 };
/* torchobs.probes.step_recorder */
enum { METER_EVERY = 32 };

/* As `finally`: an error in it takes the place of what there was before. Takes the references. */
static PyObject *outcome(int failed, PyObject *result, PyObject *type, PyObject *error, PyObject *traceback)
{
    if (!failed) {
        PyErr_Restore(type, error, traceback);
        return result;
    }
    Py_XDECREF(result);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return NULL;
}

/* -- PlainLoss: torchobs.probes.loss ----------------------------------------------------------------------------- */

enum { LOSS_VALUES, LOSS_METERED, LOSS_LOG_WINS, LOSS_IN_CLOSURE, LOSS_SCALED, LOSS_IS_OPEN };
enum { LOSS_REFERENCE, LOSS_TENSOR };
static const Plan loss_plan = {
    4, ".t", LOSS_VALUES,
    {{0, "values"}, {0, "metered"}, {0, "log_wins"}, {1, "in_closure"}, {2, "_scaled"}, {3, "is_open"}},
};

static PyObject *loss_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    return make_hook(type, args, named, &loss_plan);
}

/* 1: added; 0: the reference has to look; -1. */
static int add_loss(Hook *self, PyObject *number)
{
    PyObject *values = get(self, LOSS_VALUES);
    double loss;
    if (Py_TYPE(values) != self->values_type || !PyFloat_CheckExact(number) || !to_double(number, &loss) || !isfinite(loss))
        return 0;
    Py_INCREF(values); /* what an attribute holds may have an __iadd__ of its own */
    int failed = add_double(field(self, values, LOSS_SUM), number, loss) < 0 || add_one(field(self, values, LOSSES)) < 0
        || set_flag(field(self, values, FLAGS), FLAG_LOSS) < 0;
    Py_DECREF(values);
    return failed ? -1 : 1;
}

/* As the reference's `except RuntimeError` around `item()`: of more than one element torch is about to say so, too. What a signal
 * handler of the user's raised meanwhile is not read again, for it would be lost. */
static PyObject *loss_unread(Hook *self, PyObject *tensor)
{
    PyObject *type, *error, *traceback;
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError))
        return taken(self->owners[3]);
    PyErr_Fetch(&type, &error, &traceback);
    PyObject *elements = PyObject_CallMethodObjArgs(tensor, self->names[NUMEL], NULL), *one = PyLong_FromLong(1);
    int is_one = elements == NULL || one == NULL ? -1 : PyObject_RichCompareBool(elements, one, Py_EQ);
    Py_XDECREF(elements);
    Py_XDECREF(one);
    if (is_one == 1) {
        PyErr_Restore(type, error, traceback);
        return taken(self->owners[3]);
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    if (is_one < 0)
        return taken(self->owners[3]);
    Py_RETURN_NONE;
}

static PyObject *loss_take(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    Hook *self = (Hook *)object;
    PyObject *reference = self->held[LOSS_REFERENCE];
    if (count != 3 || args[1] != Py_None || (PyObject *)Py_TYPE(args[0]) != self->held[LOSS_TENSOR] || args[2] != Py_True
        || !is_false(self, LOSS_IS_OPEN) || !is_false(self, LOSS_METERED) || !is_false(self, LOSS_LOG_WINS)
        || !is_false(self, LOSS_IN_CLOSURE) || get(self, LOSS_SCALED) != Py_None)
        return call_with(reference, args, count);
    PyObject *on_cpu = PyObject_GetAttr(args[0], self->names[IS_CPU]);
    if (on_cpu == NULL)
        return taken(self->owners[3]);
    Py_DECREF(on_cpu);
    if (on_cpu != Py_True)
        return call_with(reference, args, count);
    PyObject *number = PyObject_CallMethodObjArgs(args[0], self->names[ITEM], NULL);
    if (number == NULL)
        return loss_unread(self, args[0]);
    int added = add_loss(self, number);
    Py_DECREF(number);
    if (added == 0)
        return call_with(reference, args, count);
    if (added < 0)
        return taken(self->owners[3]);
    Py_RETURN_NONE;
}

/* -- PlainBackward: torchobs.probes.backward --------------------------------------------------------------------- */

enum { BACK_BACKWARDS, BACK_IN_CLOSURE, BACK_THREAD, BACK_IS_OPEN, BACK_IN_PASS };
enum { BACK_TRACE, BACK_LISTENERS, BACK_MODES, BACK_ORIGINAL, BACK_ELSEWHERE, BACK_END_PASS };
static const Plan backward_plan = {
    3, "ll....", -1,
    {{0, "backwards"}, {0, "in_closure"}, {0, "thread"}, {1, "is_open"}, {2, "in_pass"}},
};

static PyObject *backward_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    return make_hook(type, args, named, &backward_plan);
}

/* 1: recorded; 0, with nothing changed, where the reference has to; -1. */
static int backward_begins(Hook *self, PyObject *args)
{
    PyObject *trace = self->held[BACK_TRACE], *listeners = self->held[BACK_LISTENERS];
    if (PyTuple_Size(args) < 2 || !is_small(self, BACK_BACKWARDS, 0) || !is_false(self, BACK_IN_CLOSURE)
        || !is_false(self, BACK_IS_OPEN) || !is_this_thread(self, BACK_THREAD))
        return 0;
    int traced = says_yes(self->held[BACK_MODES]);
    if (traced)
        return traced < 0 ? -1 : 0;
    if (stamp(trace, BACKWARD_BEGINS) < 0)
        return -1;
    for (Py_ssize_t index = 0; index < PyList_Size(listeners); index++) {
        PyObject *listener = PyList_GetItem(listeners, index);
        Py_INCREF(listener);
        PyObject *heard = PyObject_CallFunctionObjArgs(
            listener, PyTuple_GetItem(args, 0), PyTuple_GetItem(args, 1), Py_True, NULL);
        Py_DECREF(listener);
        if (heard == NULL)
            return -1;
        Py_DECREF(heard);
    }
    return set_small(self->slots[BACK_BACKWARDS], 1) < 0 ? -1 : 1;
}

/* After a backward pass in which optimizers may have stepped. */
static int end_pass(Hook *self)
{
    PyObject *in_pass = *self->slots[BACK_IN_PASS];
    if (in_pass == NULL)
        PyErr_SetString(PyExc_AttributeError, "in_pass");
    int has_stepped = in_pass == NULL ? -1 : PyObject_IsTrue(in_pass);
    if (has_stepped <= 0)
        return has_stepped;
    PyObject *done = PyObject_CallNoArgs(self->held[BACK_END_PASS]);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* run(args, kwargs). It calls the original itself: between two instructions of Python's a signal handler may raise. */
static PyObject *backward_run(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    Hook *self = (Hook *)object;
    if (!are_run_arguments(args, count))
        return NULL;
    int begun = backward_begins(self, args[0]);
    if (begun <= 0)
        return begun < 0 ? NULL : elsewhere(self, BACK_ELSEWHERE);
    PyObject *result = PyObject_Call(self->held[BACK_ORIGINAL], args[0], args[1]), *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    int failed = set_small(self->slots[BACK_BACKWARDS], 0) < 0 || stamp(self->held[BACK_TRACE], BACKWARD_ENDS) < 0;
    if (!failed && !is_false(self, BACK_IN_PASS))
        failed = end_pass(self) < 0;
    return outcome(failed, result, type, error, traceback);
}

/* -- PlainFetch: torchobs.probes.data ------------------------------------------------------------------------- */

enum { FETCH_METERED, FETCH_THREAD, FETCH_DEPTH, FETCH_IS_OPEN };
enum { FETCH_TRACE, FETCH_ARGUMENTS, FETCH_GRAD_ENABLED, FETCH_ORIGINAL, FETCH_ELSEWHERE };
static const Plan fetch_plan = {
    4, "ll...", -1, {{0, "metered"}, {1, "thread"}, {2, "_depth"}, {3, "is_open"}},
};

static PyObject *fetch_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    return make_hook(type, args, named, &fetch_plan);
}

/* As backward_begins. */
static int fetch_begins(Hook *self, PyObject *iterator)
{
    PyObject *trace = self->held[FETCH_TRACE];
    if (!is_small(self, FETCH_DEPTH, 0) || !is_false(self, FETCH_IS_OPEN) || !is_false(self, FETCH_METERED)
        || !is_this_thread(self, FETCH_THREAD) || PyList_Size(trace) > LONG_TRACE)
        return 0;
    PyObject *sampler = PyObject_GetAttr(iterator, self->names[INDEX_SAMPLER]);
    if (sampler == NULL) {
        int missing = PyErr_ExceptionMatches(PyExc_AttributeError);
        if (missing)
            PyErr_Clear();
        return missing ? 0 : -1;
    }
    PyObject *id = PyLong_FromVoidPtr(sampler);
    Py_DECREF(sampler);
    int failed = id == NULL || PyList_Append(self->held[FETCH_ARGUMENTS], id) < 0;
    Py_XDECREF(id);
    return failed || stamp(trace, FETCH) < 0 || set_small(self->slots[FETCH_DEPTH], 1) < 0 ? -1 : 1;
}

/* run(iterator): as backward_run. */
static PyObject *fetch_run(PyObject *object, PyObject *iterator)
{
    Hook *self = (Hook *)object;
    int begun = fetch_begins(self, iterator);
    if (begun <= 0)
        return begun < 0 ? NULL : elsewhere(self, FETCH_ELSEWHERE);
    PyObject *batch = PyObject_CallFunctionObjArgs(self->held[FETCH_ORIGINAL], iterator, NULL), *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    int gradients = set_small(self->slots[FETCH_DEPTH], 0) < 0 ? -1 : says_yes(self->held[FETCH_GRAD_ENABLED]);
    uint64_t code = (uint64_t)((batch == NULL ? EXHAUSTED : FETCHED) + (gradients == 0));
    int failed = gradients < 0 || stamp(self->held[FETCH_TRACE], code) < 0;
    return outcome(failed, batch, type, error, traceback);
}

/* -- PlainOptimizerStep: torchobs.probes.steps ------------------------------------------------------------------- */

enum {
    STEP_VALUES, STEP_SOLE, STEP_METERED, STEP_STEP, STEP_CLEAN, STEP_TIMED, STEP_BEGUN_NS, STEP_EXPECTED, STEP_TOKENS,
    STEP_SAMPLES, STEP_BACKWARDS, STEP_DEPTH, STEP_OUTER, STEP_GIVEN, STEP_UNTRACED, STEP_IS_OPEN, STEP_DUE_AT, STEP_RATE_KEY,
    STEP_IN_PASS,
};
enum {
    STEP_TRACE, STEP_ARGUMENTS, STEP_RUNNING, STEP_RECORDS, STEP_BEFORE, STEP_AFTER, STEP_END, STEP_NOTIFY, STEP_READ_RATE,
    STEP_MODES,
};
static const Plan step_plan = {
    6, "llds......", STEP_VALUES,
    {
        {0, "values"}, {0, "sole"}, {0, "metered"}, {0, "step"}, {0, "_clean"}, {0, "_timed"}, {0, "_begun_ns"},
        {0, "_expected"}, {0, "_tokens"}, {0, "_samples"}, {1, "backwards"}, {2, "_depth"}, {2, "_outer"}, {2, "_given"},
        {2, "_untraced"}, {3, "is_open"}, {4, "due_at"}, {5, "key"}, {0, "in_pass"},
    },
};

static PyObject *step_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    return make_hook(type, args, named, &step_plan);
}

/* 1: the first group's learning rate, a float, in groups as torch makes them; 0: the reference has to look; -1. */
static int plain_rate(const Hook *self, PyObject *optimizer, PyObject **rate)
{
    PyObject *groups = PyObject_GetAttr(optimizer, self->names[PARAM_GROUPS]), *first = NULL;
    int plain = 0;
    if (groups != NULL && PyList_CheckExact(groups) && PyList_Size(groups) > 0) {
        first = PyList_GetItem(groups, 0);
        Py_INCREF(first); /* another key's __eq__ is the user's code */
        *rate = PyDict_CheckExact(first) ? PyDict_GetItemWithError(first, self->names[LR]) : NULL;
        plain = *rate != NULL && PyFloat_CheckExact(*rate);
        if (plain)
            Py_INCREF(*rate);
    }
    Py_XDECREF(first);
    Py_XDECREF(groups);
    if (!PyErr_Occurred())
        return plain;
    int other = PyErr_ExceptionMatches(PyExc_AttributeError) || PyErr_ExceptionMatches(PyExc_LookupError)
        || PyErr_ExceptionMatches(PyExc_TypeError); /* groups of another kind */
    if (other)
        PyErr_Clear();
    return other ? 0 : -1;
}

static int note_rate(Hook *self, PyObject *optimizer)
{
    PyObject *rate = NULL;
    int plain = plain_rate(self, optimizer, &rate);
    PyObject *values = get(self, STEP_VALUES);
    if (plain < 0)
        return -1;
    if (!plain || Py_TYPE(values) != self->values_type) {
        if (plain)
            Py_DECREF(rate);
        PyObject *done = PyObject_CallFunctionObjArgs(self->held[STEP_READ_RATE], optimizer, NULL);
        Py_XDECREF(done);
        return done == NULL ? -1 : 0;
    }
    Py_INCREF(values);
    set(field(self, values, LEARNING_RATE), rate);
    int failed = set_flag(field(self, values, FLAGS), FLAG_LEARNING_RATE);
    Py_DECREF(values);
    return failed;
}

static PyObject *step_before(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    Hook *self = (Hook *)object;
    PyObject *trace = self->held[STEP_TRACE];
    if (count != 3 || !is_id(self, STEP_SOLE, args[0]) || !is_false(self, STEP_IN_PASS) || !is_small(self, STEP_DEPTH, 0)
        || !is_false(self, STEP_METERED)
        || !PyTuple_Check(args[1]) || PyTuple_Size(args[1]) > 1 || !PyDict_Check(args[2]) || PyDict_Size(args[2])
        || !is_false(self, STEP_IS_OPEN) || !PyLong_Check(get(self, STEP_STEP)) || !PyLong_Check(get(self, STEP_DUE_AT))
        || !PyLong_Check(get(self, STEP_RATE_KEY)) || code_at(trace, PyList_Size(trace) - 1) != BACKWARD_ENDS)
        return call_with(self->held[STEP_BEFORE], args, count);
    int traced = says_yes(self->held[STEP_MODES]);
    if (traced)
        return traced < 0 ? NULL : call_with(self->held[STEP_BEFORE], args, count);
    PyObject *key = get(self, STEP_SOLE);
    if (set_small(self->slots[STEP_DEPTH], 1) < 0)
        return NULL;
    Py_INCREF(key);
    set(self->slots[STEP_OUTER], key);
    set(self->slots[STEP_UNTRACED], PyBool_FromLong(1));
    if (stamp(trace, STEP_BEGINS) < 0 || (is_id(self, STEP_RATE_KEY, args[0]) && note_rate(self, args[0]) < 0))
        return NULL;
    int due = PyObject_RichCompareBool(get(self, STEP_STEP), get(self, STEP_DUE_AT), Py_GE);
    if (due > 0) {
        PyObject *done = PyObject_CallFunctionObjArgs(self->held[STEP_NOTIFY], args[0], Py_False, NULL);
        Py_XDECREF(done);
        due = done == NULL ? -1 : 0;
    }
    if (due < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* 1: the step is one of the kind that `end` writes by itself; 0: the reference has to look; -1. */
static int to_step(Hook *self, PyObject *values, uint64_t now_ns, Step *step)
{
    uint64_t number, tokens, samples;
    double square = 0.0;
    if (Py_TYPE(values) != self->values_type || get(self, STEP_CLEAN) != Py_True || get(self, STEP_TIMED) != Py_True)
        return 0;
    int differs = PyObject_RichCompareBool(self->held[STEP_ARGUMENTS], get(self, STEP_EXPECTED), Py_NE);
    if (differs)
        return differs < 0 ? -1 : 0;
    if (to_stamps(self->held[STEP_TRACE], step->stamps) != 1 || !to_unsigned(get(self, STEP_STEP), UINT64_MAX - 1, &number)
        || !to_unsigned(get(self, STEP_BEGUN_NS), UINT64_MAX, &step->begun_ns)
        || !to_unsigned(value_of(self, values, FLAGS), UINT16_MAX, &step->flags)
        || !to_unsigned(value_of(self, values, LOSSES), UINT32_MAX, &step->losses)
        || !to_double(value_of(self, values, LOSS_SUM), &step->loss)
        || !to_double(value_of(self, values, LEARNING_RATE), &step->learning_rate)
        || !to_unsigned(value_of(self, values, TOKENS), UINT64_MAX, &step->tokens)
        || !to_unsigned(get(self, STEP_TOKENS), UINT64_MAX - step->tokens, &tokens)
        || !to_unsigned(value_of(self, values, SAMPLES), UINT32_MAX, &step->samples)
        || !to_unsigned(get(self, STEP_SAMPLES), UINT32_MAX - step->samples, &samples)
        || !to_float(value_of(self, values, NORM_SCALE), &step->norm_scale) || !PyLong_Check(value_of(self, values, NUMBER)))
        return 0;
    if (step->flags & FLAG_GRAD_NORM && (!to_double(value_of(self, values, NORM_SQUARED), &square) || !(square >= 0.0)))
        return 0;
    step->step = number + 1;
    step->end_ns = now_ns;
    step->tokens += tokens;
    step->samples += samples;
    step->grad_norm = sqrt(square);
    return 1;
}

/* As StepRecorder.end_plainly: 1; 0 where it has to look, with nothing changed; -1. */
static int end_step(Hook *self, PyObject *values, uint64_t now_ns)
{
    Step step;
    int plain = to_step(self, values, now_ns, &step);
    if (plain <= 0)
        return plain;
    static const int counts[] = {FLAGS, LOSSES, TOKENS, SAMPLES}, sums[] = {LOSS_SUM, NORM_SQUARED};
    PyObject *now = PyLong_FromUnsignedLongLong(now_ns), *number = PyLong_FromUnsignedLongLong(step.step);
    PyObject *zero = PyLong_FromLong(0), *nought = PyFloat_FromDouble(0.0);
    int done = now == NULL || number == NULL || zero == NULL || nought == NULL ? -1 : 1;
    if (done < 0 || append_step(as_plain_steps(self->held[STEP_RECORDS]), &step) < 0
        || PyList_SetSlice(self->held[STEP_TRACE], 0, PyList_Size(self->held[STEP_TRACE]), NULL) < 0
        || PyList_SetSlice(self->held[STEP_ARGUMENTS], 0, PyList_Size(self->held[STEP_ARGUMENTS]), NULL) < 0)
        done = -1;
    if (done > 0) {
        Py_INCREF(now);
        set(self->slots[STEP_BEGUN_NS], now);
        Py_INCREF(number);
        set(self->slots[STEP_STEP], number);
        set(self->slots[STEP_METERED], PyBool_FromLong(step.step % METER_EVERY == 0));
        if (PyObject_Not(value_of(self, values, NUMBER)) == 1) {
            Py_INCREF(number);
            set(field(self, values, NUMBER), number);
        }
        for (size_t index = 0; index < sizeof counts / sizeof *counts; index++) {
            Py_INCREF(zero);
            set(field(self, values, counts[index]), zero);
        }
        for (size_t index = 0; index < sizeof sums / sizeof *sums; index++) {
            Py_INCREF(nought);
            set(field(self, values, sums[index]), nought);
        }
    }
    Py_XDECREF(now);
    Py_XDECREF(number);
    Py_XDECREF(zero);
    Py_XDECREF(nought);
    return done;
}

static PyObject *step_after(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    Hook *self = (Hook *)object;
    if (count != 3 || !is_id(self, STEP_SOLE, args[0]) || !is_small(self, STEP_DEPTH, 1) || !is_false(self, STEP_GIVEN)
        || !is_false(self, STEP_METERED) || !is_small(self, STEP_BACKWARDS, 0) || PyDict_Size(self->held[STEP_RUNNING])
        || !is_false(self, STEP_IS_OPEN) || !is_false(self, STEP_IN_PASS) || get(self, STEP_UNTRACED) != Py_True)
        return call_with(self->held[STEP_AFTER], args, count);
    set(self->slots[STEP_UNTRACED], PyBool_FromLong(0));
    uint64_t now_ns = monotonic_ns();
    if (set_small(self->slots[STEP_DEPTH], 0) < 0)
        return NULL;
    PyObject *values = get(self, STEP_VALUES);
    Py_INCREF(values);
    int ended = end_step(self, values, now_ns);
    Py_DECREF(values);
    if (ended < 0)
        return taken(self->owners[3]);
    if (ended)
        Py_RETURN_NONE;
    PyObject *now = PyLong_FromUnsignedLongLong(now_ns);
    PyObject *done = now == NULL ? NULL : PyObject_CallFunctionObjArgs(self->held[STEP_END], now, NULL);
    Py_XDECREF(now);
    return done;
}

/* -- the types -------------------------------------------------------------------------------------------------------- */

static PyMethodDef loss_methods[] = {{"take", FAST(loss_take), "As LossProbe's listener."}, {NULL, NULL, 0, NULL}};
static PyMethodDef backward_methods[] = {
    {"run", FAST(backward_run), "run(args, kwargs): call and record the pass; or nothing, and `elsewhere`."},
    {NULL, NULL, 0, NULL},
};
static PyMethodDef fetch_methods[] = {
    {"run", fetch_run, METH_O, "run(iterator): call and record the fetch; or nothing, and `elsewhere`."},
    {NULL, NULL, 0, NULL},
};
static PyMethodDef step_methods[] = {
    {"before", FAST(step_before), "As the optimizer's pre hook."},
    {"after", FAST(step_after), "As the optimizer's post hook."},
    {NULL, NULL, 0, NULL},
};

HOOK_TYPE("PlainLoss", loss);
HOOK_TYPE("PlainBackward", backward);
HOOK_TYPE("PlainFetch", fetch);
HOOK_TYPE("PlainOptimizerStep", step);

int add_hooks(PyObject *module)
{
    return add_type(module, "PlainLoss", &loss_spec) < 0 || add_type(module, "PlainBackward", &backward_spec) < 0
            || add_type(module, "PlainFetch", &fetch_spec) < 0 || add_type(module, "PlainOptimizerStep", &step_spec) < 0
        ? -1
        : 0;
}
