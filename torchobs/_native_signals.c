/* How a rank ended that a signal ends by its default, stored into its flight file as the signal comes.
 *
 * A handler in Python would not run while a rank is stuck in a collective. This one stores one word that was made beforehand, and
 * then has the signal do what it would have done: the process ends by it, with the same status. All that it calls is
 * async-signal-safe. Signals belong to the process, so this is the one place with state outside of objects.
 */

#include "_native.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 64 };

static volatile uint64_t words[MOST + 1];
static uint64_t *volatile target;
static volatile pid_t owner;
static PyObject *held; /* what keeps the target where it is */

static void set_action(int number, void (*handler)(int))
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = handler;
    sigemptyset(&action.sa_mask);
    sigaction(number, &action, NULL);
}

static void on_signal(int number)
{
    int before = errno;
    volatile uint64_t *word = target;
    if (word != NULL && getpid() == owner && *word == 0) /* in a child of fork it is its parent's, and what is said already stays */
        *word = words[number];
    set_action(number, SIG_DFL);
    raise(number); /* held back until this returns */
    errno = before;
}

static int has(int number, void (*handler)(int))
{
    struct sigaction action;
    return sigaction(number, NULL, &action) == 0 && !(action.sa_flags & SA_SIGINFO) && action.sa_handler == handler;
}

static PyObject *unmark_signals(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    target = NULL;
    for (int number = 1; number <= MOST; number++) {
        if (words[number] != 0 && has(number, on_signal))
            set_action(number, SIG_DFL);
        words[number] = 0;
    }
    Py_CLEAR(held);
    Py_RETURN_NONE;
}

static PyObject *mark_signals(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3 || !PyDict_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "mark_signals(target, offset, words)");
        return NULL;
    }
    size_t offset = PyLong_AsSize_t(args[1]);
    if (offset == (size_t)-1 && PyErr_Occurred())
        return NULL;
    uint64_t *word = (uint64_t *)(void *)in_map(args[0], offset, sizeof *word);
    if (word == NULL)
        return NULL;
    PyObject *none = unmark_signals(module, NULL);
    Py_DECREF(none);
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(args[2], &at, &key, &value);) {
        long number = PyLong_AsLong(key);
        uint64_t given = PyLong_AsUnsignedLongLong(value);
        if (PyErr_Occurred())
            return NULL;
        if (number < 1 || number > MOST) {
            PyErr_SetString(PyExc_ValueError, "no such signal");
            return NULL;
        }
        words[number] = given;
    }
    Py_INCREF(args[0]);
    held = args[0];
    owner = getpid();
    target = word;
    for (int number = 1; number <= MOST; number++) {
        if (words[number] != 0 && has(number, SIG_DFL))
            set_action(number, on_signal);
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"mark_signals", (PyCFunction)(void (*)(void))mark_signals, METH_FASTCALL,
     "mark_signals(target, offset, words): store ``words[number]`` at the offset of that Map, if there is 0, when a signal of that\n"
     "number ends this process, for those that have their default action. Replaces what was marked before."},
    {"unmark_signals", unmark_signals, METH_NOARGS, "Give them their default back, but for those that have another handler."},
    {NULL, NULL, 0, NULL},
};

int add_signals(PyObject *module)
{
    return PyModule_AddFunctions(module, methods);
}
