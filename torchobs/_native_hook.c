/* Makes the hooks of _native_hooks.c out of Python objects with `__slots__`.
 *
 * A hook holds its parts until it ends, as a tuple does: it has no tp_clear, so that no method finds a part missing. Every
 * cycle that it is in has an object of Python's, which the garbage collector clears.
 */

#include "_native_hook.h"

static const char *const field_names[FIELDS] = {
    "flags", "losses", "tokens", "samples", "step", "loss_sum", "norm_squared", "learning_rate", "norm_base",
    "norm_scale",
};
static const char *const name_texts[NAMES] = {"is_cpu", "item", "numel", "_index_sampler", "param_groups", "lr"};

/* Where in objects of that type a slot is, in bytes: found in one that nobody else has. -1 with an exception. */
static Py_ssize_t place_of(PyTypeObject *type, const char *name)
{
    PyObject *size = PyObject_GetAttrString((PyObject *)type, "__basicsize__");
    Py_ssize_t end = size == NULL ? -1 : PyLong_AsSsize_t(size), found = -1;
    Py_XDECREF(size);
    PyObject *made = end < 0 ? NULL : PyObject_CallMethod((PyObject *)type, "__new__", "O", (PyObject *)type);
    PyObject *mark = made == NULL ? NULL : PyList_New(0);
    if (mark != NULL && Py_TYPE(made) == type && PyObject_SetAttrString(made, name, mark) == 0) {
        const Py_ssize_t each = (Py_ssize_t)sizeof(PyObject *);
        for (Py_ssize_t at = (Py_ssize_t)sizeof(PyObject); at + each <= end; at += each) {
            if (*(PyObject **)((char *)made + at) == mark)
                found = at;
        }
    }
    Py_XDECREF(mark);
    Py_XDECREF(made);
    if (found < 0 && !PyErr_Occurred())
        PyErr_Format(PyExc_TypeError, "%s is not among the __slots__", name);
    return found;
}

static int is_kind(PyObject *object, char kind)
{
    return kind == '.' || (kind == 'l' && PyList_Check(object)) || (kind == 'd' && PyDict_Check(object))
        || (kind == 't' && PyType_Check(object)) || (kind == 's' && as_plain_steps(object) != NULL);
}

static int find_fields(Hook *self, PyObject *values)
{
    self->values_type = Py_TYPE(values);
    Py_INCREF(self->values_type);
    for (int which = 0; which < FIELDS; which++) {
        self->fields[which] = place_of(self->values_type, field_names[which]);
        if (self->fields[which] < 0)
            return -1;
    }
    return 0;
}

static int fill_hook(Hook *self, const Plan *plan, PyObject *owners, PyObject *held)
{
    Py_ssize_t kinds = 0;
    while (plan->held[kinds])
        kinds++;
    if (PyTuple_Size(owners) != plan->owners || PyTuple_Size(held) != kinds) {
        PyErr_Format(PyExc_ValueError, "%d owners and %zd others make this hook", plan->owners, kinds);
        return -1;
    }
    for (int index = 0; index < kinds; index++) {
        PyObject *object = PyTuple_GetItem(held, index);
        if (!is_kind(object, plan->held[index])) {
            PyErr_Format(PyExc_TypeError, "number %d is of another kind", index);
            return -1;
        }
        Py_INCREF(object);
        self->held[index] = object;
    }
    for (int index = 0; index < plan->owners; index++) {
        PyObject *object = PyTuple_GetItem(owners, index);
        Py_INCREF(object);
        self->owners[index] = object;
    }
    for (int slot = 0; plan->slots[slot].name != NULL; slot++) {
        PyObject *owner = self->owners[plan->slots[slot].owner];
        Py_ssize_t at = place_of(Py_TYPE(owner), plan->slots[slot].name);
        if (at < 0)
            return -1;
        self->slots[slot] = (PyObject **)(void *)((char *)owner + at);
    }
    for (int name = 0; name < NAMES; name++) {
        self->names[name] = PyUnicode_InternFromString(name_texts[name]);
        if (self->names[name] == NULL)
            return -1;
    }
    return plan->values < 0 ? 0 : find_fields(self, get(self, plan->values));
}

PyObject *make_hook(PyTypeObject *type, PyObject *args, PyObject *named, const Plan *plan)
{
    static char *names[] = {"owners", "held", NULL};
    PyObject *owners, *held;
    if (!PyArg_ParseTupleAndKeywords(args, named, "O!O!", names, &PyTuple_Type, &owners, &PyTuple_Type, &held))
        return NULL;
    Hook *self = (Hook *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0); /* all NULL */
    if (self != NULL && fill_hook(self, plan, owners, held) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

int hook_traverse(PyObject *object, visitproc visit, void *arg)
{
    Hook *self = (Hook *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->values_type);
    for (int index = 0; index < MOST_OWNERS; index++)
        Py_VISIT(self->owners[index]);
    for (int index = 0; index < MOST_HELD; index++)
        Py_VISIT(self->held[index]);
    return 0;
}

void hook_dealloc(PyObject *object)
{
    Hook *self = (Hook *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_CLEAR(self->values_type);
    for (int index = 0; index < MOST_OWNERS; index++)
        Py_CLEAR(self->owners[index]);
    for (int index = 0; index < MOST_HELD; index++)
        Py_CLEAR(self->held[index]);
    for (int name = 0; name < NAMES; name++)
        Py_CLEAR(self->names[name]);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

PyObject *taken(PyObject *breaker)
{
    PyObject *type, *error, *traceback, *known = NULL;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return NULL;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(error, traceback);
    known = PyObject_CallMethod(breaker, "takes", "O", error);
    int takes = known == NULL ? -1 : PyObject_IsTrue(known);
    Py_XDECREF(known);
    if (takes == 0) {
        PyErr_Restore(type, error, traceback);
        return NULL;
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    if (takes < 0)
        return NULL;
    Py_RETURN_NONE;
}

int says_yes(PyObject *function)
{
    PyObject *said = PyObject_CallNoArgs(function);
    int yes = said == NULL ? -1 : PyObject_IsTrue(said);
    Py_XDECREF(said);
    return yes;
}

int code_at(PyObject *trace, Py_ssize_t index)
{
    PyObject *last = PyList_GetItem(trace, index);
    if (last == NULL || !PyLong_Check(last)) {
        PyErr_Clear();
        return -1;
    }
    return (int)(PyLong_AsUnsignedLongLongMask(last) & 15);
}

int are_run_arguments(PyObject *const *args, Py_ssize_t count)
{
    int fit = count == 2 && PyTuple_Check(args[0]) && PyDict_Check(args[1]);
    if (!fit)
        PyErr_SetString(PyExc_TypeError, "run() takes a tuple and a dict");
    return fit;
}
