/* PlainSteps, compiled: the twin of the class of that name in torchobs/probes/hot_path.py, which says what each attribute is.
 *
 * Optional (docs/overhead.md). It does what its twin does, in the same order, and hands the same on to the same `slow_`
 * attributes. Between two steps of a training every function and object is a cache miss; here a step needs one of each.
 *
 * The limited API of Python 3.10: one build for all later versions. The GIL is held throughout, there is no lock and, but for
 * signals (at the end), no state outside of the objects and nothing of the process that a fork would duplicate.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Raised with every change of what Python calls: torchobs/probes/hot_path.py takes no other. */
enum { INTERFACE = 8 };

/* torchobs.probes.timeline */
enum { FETCH = 0, FETCHED = 1, EXHAUSTED = 3, BACKWARD_BEGINS = 5, BACKWARD_ENDS = 6, STEP_BEGINS = 7 };
enum { CODE = 15, LONG_TRACE = 4096 };
/* torchobs.flight.step_record */
enum { RECORD_SIZE = 128, CRC_AT = 124, KIND_PLAIN = 3, CALLED_UNIT_NS = 100 };
enum { FLAG_LOSS = 1, FLAG_GRAD_NORM = 2, FLAG_LEARNING_RATE = 4 };
enum { METER_EVERY = 32, BOUNDARIES = 5, WITHOUT_FETCH = 3 };
static const uint64_t plain_codes[BOUNDARIES] = {0, 1, 5, 6, 7};

typedef unsigned long long Whole;

/* Objects: those of the twin's attributes that are no numbers, and what records go through. */
enum {
    TRACE, ARGUMENTS, EXPECTED, PENDING, SCALED, TENSOR, LISTENERS, TAKE_LOSS, STEP_BREAKER, DATA_BREAKER, LOSS_BREAKER,
    SLOW_FETCH, SLOW_BACKWARD, SLOW_BEFORE, SLOW_AFTER, SLOW_END, END_PASS, LOSS_FAILED, NOTIFY, READ_RATE, MODES, GRAD_ENABLED,
    MEMORY, SEQUENCE, RECENT, FORCE, OBJECTS,
};
/* Names of other objects' attributes, interned. */
enum { IS_OPEN, TAKES, INDEX_SAMPLER, IS_CPU, ITEM, PARAM_GROUPS, LR, ADDRESS, STORE, APPEND, NAMES };
static const char *const name_texts[NAMES] = {
    "is_open", "takes", "_index_sampler", "is_cpu", "item", "param_groups", "lr", "address", "store", "append",
};

typedef uint32_t CrcTables[8][16];

typedef struct {
    PyObject_HEAD
    PyObject *objects[OBJECTS];
    PyObject *names[NAMES];
    Whole step, begun_ns, called_ns, flags, losses, tokens, samples, sole, rated, batch_tokens, batch_samples, thread, outer;
    long long depth, due_at;
    double loss_sum, norm_squared, norm_base, norm_scale, learning_rate;
    char evaluated, clean, timed, metered, log_wins, fetching, backwards, stepping, in_closure, in_pass;
    Whole offset, mask, forced_at;
    uint32_t seed;
    CrcTables tables;
} PlainSteps;

/* -- the record ------------------------------------------------------------------------------------------------------- */

/* Of zlib.crc32: what half a byte comes to. */
static const uint32_t crc_table[16] = {
    0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
    0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
};

/* What half a byte comes to if so many halves follow it: the eight of a word are looked up beside each other, where one after
 * the other takes three times as long. Tables by bytes are 128 cache lines in place of 8, all of them cold. */
static void make_tables(CrcTables tables)
{
    memcpy(tables[0], crc_table, sizeof crc_table);
    for (int follow = 1; follow < 8; follow++) {
        for (int half = 0; half < 16; half++) {
            uint32_t before = tables[follow - 1][half];
            tables[follow][half] = before >> 4 ^ crc_table[before & 15];
        }
    }
}

/* Of a length that is a multiple of 4. */
static uint32_t crc32_of(const unsigned char *data, size_t length, uint32_t seed, uint32_t (*tables)[16])
{
    uint32_t crc = ~seed;
    for (size_t at = 0; at < length; at += 4) {
        uint32_t word;
        memcpy(&word, data + at, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        word = __builtin_bswap32(word);
#endif
        crc ^= word;
        crc = tables[7][crc & 15] ^ tables[6][crc >> 4 & 15] ^ tables[5][crc >> 8 & 15] ^ tables[4][crc >> 12 & 15]
            ^ tables[3][crc >> 16 & 15] ^ tables[2][crc >> 20 & 15] ^ tables[1][crc >> 24 & 15] ^ tables[0][crc >> 28];
    }
    return ~crc;
}

static inline unsigned char *put(unsigned char *at, uint64_t value, size_t size)
{
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value) >> (64 - 8 * size);
#endif
    memcpy(at, &value, size);
    return at + size;
}

static inline unsigned char *put_double(unsigned char *at, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return put(at, bits, sizeof bits);
}

/* As `step_record.PLAIN` and its CRC: 1, or 0 where a field cannot hold its value. */
static int pack(PlainSteps *self, unsigned char *record, uint64_t seq, const uint64_t *stamps, uint64_t end_ns, uint64_t called)
{
    const uint64_t tokens = self->tokens + self->batch_tokens, samples = self->samples + self->batch_samples;
    const double square = self->flags & FLAG_GRAD_NORM ? self->norm_squared : 0.0;
    const float scale = (float)self->norm_scale;
    if (self->step == UINT64_MAX || self->flags > UINT16_MAX || self->losses > UINT32_MAX || samples > UINT32_MAX
        || samples < self->samples || tokens < self->tokens || square < 0.0 || (isfinite(self->norm_scale) && !isfinite(scale)))
        return 0;
    uint32_t scale_bits;
    memcpy(&scale_bits, &scale, sizeof scale_bits);
    unsigned char *at = put(record, seq, 8);
    at = put(at, self->step + 1, 8);
    at = put(at, end_ns, 8);
    at = put(at, KIND_PLAIN, 2);
    at = put(at, self->flags, 2);
    at = put(at, self->losses, 4);
    at = put(at, stamps[0], 8);
    at = put_double(at, self->loss_sum);
    at = put_double(at, sqrt(square));
    at = put_double(at, self->learning_rate);
    for (int index = 1; index < BOUNDARIES; index++)
        at = put(at, stamps[index], 8);
    at = put(at, tokens, 8);
    at = put(at, samples, 4);
    at = put(at, scale_bits, 4);
    at = put(at, self->begun_ns, 8);
    at = put(at, called, 4);
    put(at, crc32_of(record, CRC_AT, self->seed, self->tables), 4);
    return 1;
}

/* -- small things ----------------------------------------------------------------------------------------------------- */

static uint64_t monotonic_ns(void)
{
#ifdef __APPLE__
    return clock_gettime_nsec_np(CLOCK_UPTIME_RAW); /* time.monotonic_ns is mach_absolute_time there */
#else
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
#endif
}

/* As PyLong_AsUnsignedLongLong, which takes a large number byte by byte: 100 instructions more (CPython 3.11). */
static inline uint64_t as_uint64(PyObject *object)
{
#if ULONG_MAX == UINT64_MAX
    return PyLong_AsUnsignedLong(object);
#else
    return PyLong_AsUnsignedLongLong(object);
#endif
}

static inline PyObject *get(const PlainSteps *self, int which)
{
    PyObject *object = self->objects[which];
    return object == NULL ? Py_None : object; /* borrowed; one that was deleted is none */
}

static inline uint64_t id_of(const void *object)
{
    return (uint64_t)(uintptr_t)object;
}

/* Appends `monotonic_ns() << 4 | code` to the trace; 0, or -1 with an exception. */
static int stamp(PlainSteps *self, uint64_t code)
{
    PyObject *made = PyLong_FromUnsignedLongLong(monotonic_ns() << 4 | code);
    if (made == NULL)
        return -1;
    int failed = PyList_Append(get(self, TRACE), made);
    Py_DECREF(made);
    return failed;
}

/* The truth of what it takes the reference of, or -1 with an exception. */
static int truth_of(PyObject *object)
{
    int truth = object == NULL ? -1 : PyObject_IsTrue(object);
    Py_XDECREF(object);
    return truth;
}

/* 0, or -1 with an exception, of the result of a call, whose reference it takes. */
static int done(PyObject *result)
{
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static int is_open(PlainSteps *self, int breaker)
{
    return truth_of(PyObject_GetAttr(get(self, breaker), self->names[IS_OPEN]));
}

/* Whether torch has a dispatch mode in force: a graph may be being made. */
static int has_modes(PlainSteps *self)
{
    return truth_of(PyObject_CallNoArgs(get(self, MODES)));
}

/* The exception that is set, if it is an `Exception`, which is cleared then; else NULL. */
static PyObject *caught(void)
{
    PyObject *type, *error, *traceback;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return NULL;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(error, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return error;
}

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

static int are(Py_ssize_t count, Py_ssize_t wanted)
{
    if (count != wanted)
        PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", wanted, count);
    return count == wanted;
}

/* -- append ----------------------------------------------------------------------------------------------------------- */

/* 1: these are a plain step's boundaries; 0: others; -1. */
static int to_stamps(PyObject *trace, uint64_t *stamps)
{
    Py_ssize_t length = PyList_Size(trace);
    if (length != BOUNDARIES && length != WITHOUT_FETCH)
        return 0;
    int first = (int)(BOUNDARIES - length);
    for (int index = 0; index < first; index++)
        stamps[index] = plain_codes[index]; /* at 0 ns */
    for (int index = first; index < BOUNDARIES; index++) {
        stamps[index] = as_uint64(PyList_GetItem(trace, index - first));
        if (stamps[index] == UINT64_MAX && PyErr_Occurred())
            return -1;
    }
    for (int index = first; index < BOUNDARIES; index++) {
        if ((stamps[index] & CODE) != plain_codes[index])
            return 0;
    }
    return 1;
}

/* Store the record: it is packed elsewhere and copied whole, by one of the two stores that the format allows. */
static int store(PlainSteps *self, uint64_t offset, PyObject *raw, const unsigned char *record)
{
    PyObject *at = PyObject_GetAttr(get(self, MEMORY), self->names[ADDRESS]);
    void *address = at == NULL ? NULL : PyLong_AsVoidPtr(at);
    Py_XDECREF(at);
    if (address != NULL) {
        memcpy((unsigned char *)address + offset, record, RECORD_SIZE);
        return 0;
    }
    PyObject *place = PyErr_Occurred() ? NULL : PyLong_FromUnsignedLongLong(offset);
    if (place == NULL)
        return -1;
    int failed = done(PyObject_CallMethodObjArgs(get(self, MEMORY), self->names[STORE], place, raw, NULL));
    Py_DECREF(place);
    return failed;
}

/* The next record's number; 0 with an exception. */
static uint64_t next_number(PlainSteps *self)
{
    PyObject *number = PyIter_Next(get(self, SEQUENCE));
    if (number == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetNone(PyExc_StopIteration);
        return 0;
    }
    uint64_t seq = as_uint64(number);
    Py_DECREF(number);
    return seq == UINT64_MAX && PyErr_Occurred() ? 0 : seq;
}

/* Store the record, and keep it for the fold. */
static int keep(PlainSteps *self, uint64_t seq, const unsigned char *record)
{
    PyObject *raw = PyBytes_FromStringAndSize((const char *)record, RECORD_SIZE);
    if (raw == NULL)
        return -1;
    int failed = store(self, self->offset + ((seq - 1) & self->mask) * RECORD_SIZE, raw, record) < 0
        || done(PyObject_CallMethodObjArgs(get(self, RECENT), self->names[APPEND], raw, NULL)) < 0;
    Py_DECREF(raw);
    return failed ? -1 : 0;
}

static int empty(PyObject *list)
{
    return PyList_SetSlice(list, 0, PyList_Size(list), NULL);
}

/* Fold before unfolded records could be overwritten. */
static int relieve(PlainSteps *self)
{
    Py_ssize_t unfolded = PyObject_Size(get(self, RECENT));
    if (unfolded < 0)
        return -1;
    return (Whole)unfolded >= self->forced_at ? done(PyObject_CallNoArgs(get(self, FORCE))) : 0;
}

/* As PlainSteps.append: 1; 0 where it is no plain step; -1. */
static int append(PlainSteps *self, uint64_t end_ns)
{
    uint64_t stamps[BOUNDARIES], called = 0;
    unsigned char record[RECORD_SIZE];
    if (!self->clean || !self->timed)
        return 0;
    int differs = PyObject_RichCompareBool(get(self, ARGUMENTS), get(self, EXPECTED), Py_NE);
    if (differs)
        return differs < 0 ? -1 : 0;
    int plain = to_stamps(get(self, TRACE), stamps);
    if (plain <= 0)
        return plain;
    if (self->called_ns > self->begun_ns) {
        called = (self->called_ns - self->begun_ns) / CALLED_UNIT_NS;
        called = called > UINT32_MAX ? 0 : called;
    }
    uint64_t seq = next_number(self);
    if (seq == 0)
        return -1;
    if (!pack(self, record, seq, stamps, end_ns, called))
        return 0;
    if (keep(self, seq, record) < 0 || empty(get(self, TRACE)) < 0 || empty(get(self, ARGUMENTS)) < 0)
        return -1;
    self->begun_ns = end_ns;
    self->step++;
    self->metered = self->step % METER_EVERY == 0;
    self->called_ns = self->flags = self->losses = self->tokens = self->samples = 0;
    self->loss_sum = self->norm_squared = 0.0;
    return relieve(self) < 0 ? -1 : 1;
}

static PyObject *plain_append(PyObject *object, PyObject *now)
{
    uint64_t now_ns = as_uint64(now);
    if (now_ns == UINT64_MAX && PyErr_Occurred())
        return NULL;
    int appended = append((PlainSteps *)object, now_ns);
    return appended < 0 ? NULL : PyBool_FromLong(appended);
}

/* -- fetch ------------------------------------------------------------------------------------------------------------ */

/* The loader's sampler, which belongs to it, so that it is the same in every epoch; NULL where the fetch is no plain step's. */
static PyObject *sampler_of(PlainSteps *self, PyObject *iterator)
{
    if (self->fetching || self->metered)
        return NULL;
    int open = is_open(self, DATA_BREAKER);
    if (open || PyThread_get_thread_ident() != self->thread || PyList_Size(get(self, TRACE)) > LONG_TRACE)
        return NULL;
    PyObject *sampler = PyObject_GetAttr(iterator, self->names[INDEX_SAMPLER]);
    if (sampler == NULL && PyErr_ExceptionMatches(PyExc_AttributeError))
        PyErr_Clear();
    return sampler;
}

static PyObject *plain_fetch(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    PlainSteps *self = (PlainSteps *)object;
    if (!are(count, 2))
        return NULL;
    PyObject *sampler = sampler_of(self, args[1]), *type, *error, *traceback;
    if (sampler == NULL)
        return PyErr_Occurred() ? NULL : PyObject_CallFunctionObjArgs(get(self, SLOW_FETCH), args[0], args[1], NULL);
    PyObject *key = PyLong_FromVoidPtr(sampler);
    Py_DECREF(sampler);
    int failed = key == NULL || PyList_Append(get(self, ARGUMENTS), key) < 0 || stamp(self, FETCH) < 0;
    Py_XDECREF(key);
    if (failed)
        return NULL;
    self->fetching = 1;
    PyObject *batch = PyObject_CallFunctionObjArgs(args[0], args[1], NULL);
    PyErr_Fetch(&type, &error, &traceback);
    self->fetching = 0;
    int gradients = truth_of(PyObject_CallNoArgs(get(self, GRAD_ENABLED)));
    uint64_t code = (uint64_t)((batch == NULL ? EXHAUSTED : FETCHED) + (gradients == 0));
    return outcome(gradients < 0 || stamp(self, code) < 0, batch, type, error, traceback);
}

/* -- backward --------------------------------------------------------------------------------------------------------- */

/* The loss as a plain tensor on the CPU has it, new; None, where it is another; NULL with an exception. */
static PyObject *number_of(PlainSteps *self, PyObject *loss)
{
    PyObject *on_cpu = PyObject_GetAttr(loss, self->names[IS_CPU]);
    if (on_cpu == NULL)
        return NULL;
    Py_DECREF(on_cpu);
    if (on_cpu != Py_True)
        Py_RETURN_NONE;
    return PyObject_CallMethodObjArgs(loss, self->names[ITEM], NULL);
}

/* 1: it was a plain loss; 0: any other; -1. */
static int read_loss(PlainSteps *self, PyObject *loss, PyObject *gradient)
{
    if (gradient != Py_None || (PyObject *)Py_TYPE(loss) != get(self, TENSOR) || self->metered || self->log_wins
        || get(self, SCALED) != Py_None)
        return 0;
    int open = is_open(self, LOSS_BREAKER);
    if (open)
        return open < 0 ? -1 : 0;
    PyObject *number = number_of(self, loss);
    if (number == NULL) {
        PyObject *error = caught();
        int failed = error == NULL ? -1 : done(PyObject_CallFunctionObjArgs(get(self, LOSS_FAILED), error, loss, NULL));
        Py_XDECREF(error);
        return failed ? -1 : 1;
    }
    double value = PyFloat_CheckExact(number) ? PyFloat_AsDouble(number) : NAN;
    Py_DECREF(number);
    if (!isfinite(value))
        return 0;
    self->loss_sum += value;
    self->losses++;
    self->flags |= FLAG_LOSS;
    return 1;
}

/* Have the loss read, and the others hear of it. */
static int hear(PlainSteps *self, PyObject *loss, PyObject *gradient)
{
    PyObject *listeners = get(self, LISTENERS);
    if (!PyList_Check(listeners)) {
        PyErr_SetString(PyExc_TypeError, "listeners are a list");
        return -1;
    }
    Py_INCREF(listeners);
    int failed = 0;
    for (Py_ssize_t index = 0; !failed && index < PyList_Size(listeners); index++) {
        PyObject *listener = PyList_GetItem(listeners, index);
        Py_INCREF(listener);
        int is_read = listener == get(self, TAKE_LOSS) ? read_loss(self, loss, gradient) : 0;
        failed = is_read < 0;
        if (!is_read)
            failed = done(PyObject_CallFunctionObjArgs(listener, loss, gradient, Py_True, NULL));
        Py_DECREF(listener);
    }
    Py_DECREF(listeners);
    return failed ? -1 : 0;
}

/* 1: a plain step's backward pass begins; 0: any other; -1. */
static int is_plain_pass(PlainSteps *self, PyObject *args)
{
    if (self->backwards || self->in_closure || PyThread_get_thread_ident() != self->thread || PyTuple_Size(args) < 2)
        return 0;
    int stops = is_open(self, STEP_BREAKER);
    stops = stops ? stops : has_modes(self);
    return stops < 0 ? -1 : !stops;
}

/* It calls the original itself: between two instructions of Python's a signal handler may raise. */
static PyObject *plain_backward(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    PlainSteps *self = (PlainSteps *)object;
    PyObject *type, *error, *traceback;
    if (!are(count, 3))
        return NULL;
    if (!PyTuple_Check(args[1]) || !PyDict_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "a tuple and a dict are the arguments");
        return NULL;
    }
    int plain = is_plain_pass(self, args[1]);
    if (plain <= 0)
        return plain < 0 ? NULL : PyObject_CallFunctionObjArgs(get(self, SLOW_BACKWARD), args[0], args[1], args[2], NULL);
    if (stamp(self, BACKWARD_BEGINS) < 0 || hear(self, PyTuple_GetItem(args[1], 0), PyTuple_GetItem(args[1], 1)) < 0)
        return NULL;
    self->backwards = 1;
    PyObject *result = PyObject_Call(args[0], args[1], args[2]);
    PyErr_Fetch(&type, &error, &traceback);
    self->backwards = 0;
    int failed = stamp(self, BACKWARD_ENDS) < 0;
    if (!failed && self->in_pass)
        failed = done(PyObject_CallNoArgs(get(self, END_PASS)));
    return outcome(failed, result, type, error, traceback);
}

/* -- the optimizer's step --------------------------------------------------------------------------------------------- */

/* 1: the first group's learning rate is a float; 0: it is to be read otherwise; -1. */
static int plain_rate(PlainSteps *self, PyObject *optimizer, double *rate)
{
    PyObject *groups = PyObject_GetAttr(optimizer, self->names[PARAM_GROUPS]);
    PyObject *first = groups == NULL ? NULL : PySequence_GetItem(groups, 0);
    PyObject *found = first == NULL ? NULL : PyObject_GetItem(first, self->names[LR]);
    int plain = found != NULL && PyFloat_CheckExact(found);
    if (plain)
        *rate = PyFloat_AsDouble(found);
    Py_XDECREF(found);
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

static int note_rate(PlainSteps *self, PyObject *optimizer)
{
    double rate;
    int plain = plain_rate(self, optimizer, &rate);
    if (plain < 0)
        return -1;
    if (!plain)
        return done(PyObject_CallFunctionObjArgs(get(self, READ_RATE), optimizer, NULL));
    self->learning_rate = rate;
    self->flags |= FLAG_LEARNING_RATE;
    return 0;
}

/* Whether the last boundary is the end of a backward pass. */
static int follows_backward(PlainSteps *self)
{
    PyObject *trace = get(self, TRACE);
    Py_ssize_t length = PyList_Size(trace);
    if (length == 0)
        return 0;
    PyObject *last = PyList_GetItem(trace, length - 1);
    return PyLong_Check(last) && (PyLong_AsUnsignedLongLongMask(last) & CODE) == BACKWARD_ENDS;
}

/* 1: a plain step begins; 0: any other; -1. */
static int is_plain_step(PlainSteps *self, PyObject *const *args)
{
    if (id_of(args[0]) != self->sole || self->depth || self->metered || !PyDict_Check(args[2]) || PyDict_Size(args[2])
        || !PyTuple_Check(args[1]) || PyTuple_Size(args[1]) > 1 || !follows_backward(self))
        return 0;
    int stops = is_open(self, STEP_BREAKER);
    stops = stops ? stops : has_modes(self);
    return stops < 0 ? -1 : !stops;
}

static PyObject *plain_before(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    PlainSteps *self = (PlainSteps *)object;
    if (!are(count, 3))
        return NULL;
    int plain = is_plain_step(self, args);
    if (plain <= 0)
        return plain < 0 ? NULL : PyObject_CallFunctionObjArgs(get(self, SLOW_BEFORE), args[0], args[1], args[2], NULL);
    self->depth = 1;
    self->outer = id_of(args[0]);
    self->stepping = 1;
    if (stamp(self, STEP_BEGINS) < 0 || (self->rated == self->outer && note_rate(self, args[0]) < 0))
        return NULL;
    int is_due = self->due_at < 0 || self->step >= (Whole)self->due_at;
    if (is_due && done(PyObject_CallFunctionObjArgs(get(self, NOTIFY), args[0], Py_False, NULL)) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* As the `except` of a hook in Python: None for an exception that the probe's breaker takes, or NULL with the exception. */
static PyObject *taken(PlainSteps *self)
{
    PyObject *error = caught();
    if (error == NULL)
        return NULL;
    int takes = truth_of(PyObject_CallMethodObjArgs(get(self, STEP_BREAKER), self->names[TAKES], error, NULL));
    if (takes == 0) {
        PyObject *type = (PyObject *)Py_TYPE(error);
        Py_INCREF(type);
        PyErr_Restore(type, error, PyException_GetTraceback(error));
        return NULL;
    }
    Py_DECREF(error);
    if (takes < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *plain_after(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    PlainSteps *self = (PlainSteps *)object;
    if (!are(count, 3))
        return NULL;
    int stops = !self->stepping || id_of(args[0]) != self->sole || self->depth != 1;
    stops = stops ? stops : is_open(self, STEP_BREAKER);
    if (stops)
        return stops < 0 ? NULL : PyObject_CallFunctionObjArgs(get(self, SLOW_AFTER), args[0], args[1], args[2], NULL);
    uint64_t now_ns = monotonic_ns();
    self->stepping = 0;
    self->depth = 0;
    int failed = append(self, now_ns);
    if (failed == 0) {
        PyObject *now = PyLong_FromUnsignedLongLong(now_ns);
        failed = now == NULL ? -1 : done(PyObject_CallFunctionObjArgs(get(self, SLOW_END), now, NULL));
        Py_XDECREF(now);
    }
    if (failed < 0)
        return taken(self);
    Py_RETURN_NONE;
}

/* -- the type ------------------------------------------------------------------------------------------------------- */

static int plain_fill(PlainSteps *self, PyObject *args)
{
    static const int ring[] = {MEMORY, SEQUENCE, RECENT, FORCE};
    PyObject *given[] = {Py_None, Py_None, Py_None, Py_None};
    unsigned long seed = 0;
    if (!PyArg_ParseTuple(
            args, "|OOOOKKKk", &given[0], &given[1], &given[2], &given[3], &self->offset, &self->mask, &self->forced_at, &seed))
        return -1;
    if (PyTuple_Size(args) != 0 && !PyIter_Check(given[1])) {
        PyErr_SetString(PyExc_TypeError, "the sequence is an iterator");
        return -1;
    }
    for (int index = 0; index < 4; index++) {
        Py_INCREF(given[index]);
        self->objects[ring[index]] = given[index];
    }
    self->seed = (uint32_t)seed;
    for (int name = 0; name < NAMES; name++) {
        self->names[name] = PyUnicode_InternFromString(name_texts[name]);
        if (self->names[name] == NULL)
            return -1;
    }
    self->objects[TRACE] = PyList_New(0);
    self->objects[ARGUMENTS] = PyList_New(0);
    self->objects[LISTENERS] = PyList_New(0);
    return self->objects[TRACE] == NULL || self->objects[ARGUMENTS] == NULL || self->objects[LISTENERS] == NULL ? -1 : 0;
}

static PyObject *plain_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(named))
{
    PlainSteps *self = (PlainSteps *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0); /* all 0 */
    if (self != NULL && plain_fill(self, args) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    if (self != NULL) {
        self->norm_scale = 1.0;
        self->due_at = PY_SSIZE_T_MAX;
        self->thread = PyThread_get_thread_ident();
        make_tables(self->tables);
    }
    return (PyObject *)self;
}

/* There is no tp_clear, so that no method finds a part missing: every cycle has an object of Python's, which is cleared. */
static int plain_traverse(PyObject *object, visitproc visit, void *arg)
{
    PlainSteps *self = (PlainSteps *)object;
    Py_VISIT(Py_TYPE(object));
    for (int which = 0; which < OBJECTS; which++)
        Py_VISIT(self->objects[which]);
    return 0;
}

static void plain_dealloc(PyObject *object)
{
    PlainSteps *self = (PlainSteps *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    for (int which = 0; which < OBJECTS; which++)
        Py_CLEAR(self->objects[which]);
    for (int name = 0; name < NAMES; name++)
        Py_CLEAR(self->names[name]);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

#define MEMBER(name, kind) {#name, kind, offsetof(PlainSteps, name), 0, NULL}
#define PLACE(which) (Py_ssize_t)(offsetof(PlainSteps, objects) + which * sizeof(PyObject *))
#define OBJECT(name, which) {name, T_OBJECT, PLACE(which), 0, NULL}
#define KEPT(name, which) {name, T_OBJECT, PLACE(which), READONLY, NULL}

static PyMemberDef plain_members[] = {
    KEPT("trace", TRACE), KEPT("arguments", ARGUMENTS), OBJECT("expected", EXPECTED), OBJECT("pending", PENDING),
    OBJECT("scaled", SCALED), OBJECT("tensor", TENSOR), OBJECT("listeners", LISTENERS), OBJECT("take_loss", TAKE_LOSS),
    OBJECT("step_breaker", STEP_BREAKER), OBJECT("data_breaker", DATA_BREAKER), OBJECT("loss_breaker", LOSS_BREAKER),
    OBJECT("slow_fetch", SLOW_FETCH), OBJECT("slow_backward", SLOW_BACKWARD), OBJECT("slow_before", SLOW_BEFORE),
    OBJECT("slow_after", SLOW_AFTER), OBJECT("slow_end", SLOW_END), OBJECT("end_pass", END_PASS),
    OBJECT("loss_failed", LOSS_FAILED), OBJECT("notify", NOTIFY), OBJECT("read_rate", READ_RATE), OBJECT("modes", MODES),
    OBJECT("grad_enabled", GRAD_ENABLED),
    MEMBER(step, T_ULONGLONG), MEMBER(begun_ns, T_ULONGLONG), MEMBER(called_ns, T_ULONGLONG), MEMBER(flags, T_ULONGLONG),
    MEMBER(losses, T_ULONGLONG), MEMBER(tokens, T_ULONGLONG), MEMBER(samples, T_ULONGLONG), MEMBER(sole, T_ULONGLONG),
    MEMBER(rated, T_ULONGLONG), MEMBER(batch_tokens, T_ULONGLONG), MEMBER(batch_samples, T_ULONGLONG),
    MEMBER(thread, T_ULONGLONG), MEMBER(outer, T_ULONGLONG), MEMBER(depth, T_LONGLONG), MEMBER(due_at, T_LONGLONG),
    MEMBER(loss_sum, T_DOUBLE), MEMBER(norm_squared, T_DOUBLE), MEMBER(norm_base, T_DOUBLE), MEMBER(norm_scale, T_DOUBLE),
    MEMBER(learning_rate, T_DOUBLE),
    MEMBER(evaluated, T_BOOL), MEMBER(clean, T_BOOL), MEMBER(timed, T_BOOL), MEMBER(metered, T_BOOL), MEMBER(log_wins, T_BOOL),
    MEMBER(fetching, T_BOOL), MEMBER(backwards, T_BOOL), MEMBER(stepping, T_BOOL), MEMBER(in_closure, T_BOOL),
    MEMBER(in_pass, T_BOOL),
    {NULL, 0, 0, 0, NULL},
};

#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL

static PyMethodDef plain_methods[] = {
    {"fetch", FAST(plain_fetch), "fetch(original, iterator)"},
    {"backward", FAST(plain_backward), "backward(original, args, kwargs)"},
    {"before_step", FAST(plain_before), "before_step(optimizer, args, kwargs)"},
    {"after_step", FAST(plain_after), "after_step(optimizer, args, kwargs)"},
    {"append", plain_append, METH_O, "append(end_ns)"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot plain_slots[] = {
    {Py_tp_doc, "See torchobs.probes.hot_path.PlainSteps."},
    {Py_tp_new, plain_new},
    {Py_tp_traverse, plain_traverse},
    {Py_tp_dealloc, plain_dealloc},
    {Py_tp_members, plain_members},
    {Py_tp_methods, plain_methods},
    {0, NULL},
};
static PyType_Spec plain_spec = {
    "torchobs._native.PlainSteps", sizeof(PlainSteps), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, plain_slots,
};

/* -- signals that end the process ---------------------------------------------------------------------------------------
 *
 * Which one it was is written as it comes: a handler in Python would not run while a rank is stuck in a collective. This one
 * writes a line that was made beforehand, and then has the signal do what it would have done. All that it calls is
 * async-signal-safe. See torchobs.flight.endings.mark_exits.
 */

enum { MOST_SIGNALS = 64, MOST_OF_LINE = 32 };

static char lines[MOST_SIGNALS + 1][MOST_OF_LINE];
static volatile int target = -1;
static volatile pid_t owner;
static dev_t device;
static ino_t inode;

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
    struct stat file;
    /* of a child of fork it is its parent's; the number may be another file's by now; what is said already stays */
    int is_ours = target >= 0 && getpid() == owner && fstat(target, &file) == 0 && file.st_dev == device && file.st_ino == inode;
    if (is_ours && file.st_size == 0 && pwrite(target, lines[number], strlen(lines[number]), 0) < 0)
        before = errno; /* nobody could be told */
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
    target = -1;
    for (int number = 1; number <= MOST_SIGNALS; number++) {
        if (lines[number][0] != 0 && has(number, on_signal))
            set_action(number, SIG_DFL);
        lines[number][0] = 0;
    }
    Py_RETURN_NONE;
}

static PyObject *mark_signals(PyObject *module, PyObject *args)
{
    PyObject *given, *key, *value;
    struct stat file;
    int descriptor;
    if (!PyArg_ParseTuple(args, "iO!", &descriptor, &PyDict_Type, &given))
        return NULL;
    Py_DECREF(unmark_signals(module, NULL));
    if (fstat(descriptor, &file) != 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    for (Py_ssize_t at = 0; PyDict_Next(given, &at, &key, &value);) {
        long number = PyLong_AsLong(key);
        char *line = PyBytes_AsString(value);
        if (PyErr_Occurred())
            return NULL;
        if (number >= 1 && number <= MOST_SIGNALS && strlen(line) < MOST_OF_LINE)
            strcpy(lines[number], line);
    }
    owner = getpid();
    device = file.st_dev;
    inode = file.st_ino;
    target = descriptor;
    for (int number = 1; number <= MOST_SIGNALS; number++) {
        if (lines[number][0] != 0 && has(number, SIG_DFL))
            set_action(number, on_signal);
    }
    Py_RETURN_NONE;
}

/* -- stacks where the GIL is held: torchobs.runtime.stacks says why one signal is not enough ----------------------------- */

enum { SILENT_SIGNALS = 6 };
static void (*write_stacks)(int);
static volatile sig_atomic_t silent;

static void on_silence(int number)
{
    if (++silent == SILENT_SIGNALS)
        write_stacks(number);
}

static PyObject *count_signals(PyObject *Py_UNUSED(module), PyObject *number)
{
    struct sigaction action;
    int watched = (int)PyLong_AsLong(number);
    if (sigaction(watched, NULL, &action) == 0 && action.sa_handler != on_silence) {
        write_stacks = action.sa_handler;
        action.sa_handler = on_silence;
        sigaction(watched, &action, NULL);
    }
    return PyErr_Occurred() == NULL ? Py_NewRef(Py_None) : NULL;
}

static PyObject *count_anew(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    silent = 0;
    Py_RETURN_NONE;
}

/* -- the module ------------------------------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    {"mark_signals", mark_signals, METH_VARARGS,
     "mark_signals(descriptor, lines): write ``lines[number]`` into the file, if it is empty, when a signal of that number ends\n"
     "this process, for those that have their default action. Replaces what was marked before. Raises ``OSError``."},
    {"unmark_signals", unmark_signals, METH_NOARGS, "Give them their default back, but for those that have another handler."},
    {"count_signals", count_signals, METH_O, "Have the handler of that signal called once, by the sixth after ``count_anew()``."},
    {"count_anew", count_anew, METH_NOARGS, "Begin to count."},
    {NULL, NULL, 0, NULL},
};

static int fill(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &plain_spec, NULL);
    if (type == NULL)
        return -1;
    int failed = PyModule_AddObjectRef(module, "PlainSteps", type);
    Py_DECREF(type);
    failed = failed || PyModule_AddIntConstant(module, "SILENT_SIGNALS", SILENT_SIGNALS) < 0;
    return failed ? -1 : PyModule_AddIntConstant(module, "INTERFACE", INTERFACE);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "torchobs._native", "See _native.c.", 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
