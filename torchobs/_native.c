/* The part of a training step that is the same every time: time stamps of its boundaries, and the record of a plain step.
 *
 * Optional. Pure Python is the fallback and the reference (`FlightWriter._plain_appender`, docs/overhead.md): what is unusual
 * here, a value that a field cannot hold included, is handed to it unchanged, so that it decides and raises. Between two steps
 * of a training every function and object is a cache miss; here a step needs one of each.
 *
 * The limited API of Python 3.10: one build for all later versions. The GIL is held throughout, there is no lock, and, but for
 * signals (_native_signals.c), no state outside of the objects and nothing of the process that a fork would duplicate.
 */

#include "_native.h"

#include <math.h>
#include <string.h>
#include <time.h>

/* Raised with every change of what Python calls: torchobs/flight/native.py takes no other. */
enum { INTERFACE = 5 };
enum { RECORD_SIZE = 128, CRC_AT = 124, KIND_PLAIN = 3, WITHOUT_FETCH = 3 };

/* torchobs.flight.step_record.PLAIN_CODES */
static const uint64_t plain_codes[BOUNDARIES] = {0, 1, 5, 6, 7};

/* -- the record ------------------------------------------------------------------------------------------------------- */

/* Of zlib.crc32: what half a byte comes to. */
static const uint32_t crc_table[16] = {
    0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
    0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
};

/* What half a byte comes to if so many halves follow it: the eight of a word are looked up beside each other, where one after
 * the other takes three times as long. Tables by bytes are 128 cache lines in place of 8, all of them cold. */
typedef uint32_t CrcTables[8][16];

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
    value = __builtin_bswap64(value);
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

static inline unsigned char *put_float(unsigned char *at, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return put(at, bits, sizeof bits);
}

/* As `step_record.PLAIN` and its CRC. */
static void pack(unsigned char *record, uint64_t seq, const Step *step, uint32_t seed, uint32_t (*tables)[16])
{
    unsigned char *at = put(record, seq, 8);
    at = put(at, step->step, 8);
    at = put(at, step->end_ns, 8);
    at = put(at, KIND_PLAIN, 2);
    at = put(at, step->flags, 2);
    at = put(at, step->losses, 4);
    at = put(at, step->stamps[0], 8);
    at = put_double(at, step->loss);
    at = put_double(at, step->grad_norm);
    at = put_double(at, step->learning_rate);
    for (int index = 1; index < BOUNDARIES; index++)
        at = put(at, step->stamps[index], 8);
    at = put(at, step->tokens, 8);
    at = put(at, step->samples, 4);
    at = put_float(at, step->norm_scale);
    at = put(at, step->begun_ns, 8);
    at = put(at, 0, 4);
    put(at, crc32_of(record, CRC_AT, seed, tables), 4);
}

/* -- its values, from Python's: 1, or 0 without an exception where the reference has to look ---------------------------- */

int to_unsigned(PyObject *object, uint64_t most, uint64_t *value)
{
    if (!PyLong_Check(object))
        return 0;
    *value = as_uint64(object);
    if (*value == UINT64_MAX && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return *value <= most;
}

int to_double(PyObject *object, double *value)
{
    if (!PyFloat_Check(object))
        return 0; /* another object's __float__ is the user's code */
    *value = PyFloat_AsDouble(object);
    return 1;
}

int to_float(PyObject *object, float *value)
{
    double wide;
    if (!to_double(object, &wide) || !isfinite(wide))
        return 0;
    *value = (float)wide;
    return isfinite(*value);
}

/* 1: a plain step's boundaries; 0: others; -1: the reference has to look. */
int to_stamps(PyObject *boundaries, uint64_t *stamps)
{
    if (!PyList_Check(boundaries))
        return -1;
    Py_ssize_t length = PyList_Size(boundaries);
    if (length != BOUNDARIES && length != WITHOUT_FETCH)
        return 0;
    int first = (int)(BOUNDARIES - length);
    for (int index = 0; index < first; index++)
        stamps[index] = plain_codes[index]; /* at 0 ns */
    for (int index = first; index < BOUNDARIES; index++) {
        if (!to_unsigned(PyList_GetItem(boundaries, index - first), UINT64_MAX, &stamps[index]))
            return -1;
    }
    for (int index = first; index < BOUNDARIES; index++) {
        if ((stamps[index] & 15) != plain_codes[index])
            return 0;
    }
    return 1;
}

/* -- Map -------------------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *anchor;
    unsigned char *begin;
    size_t size;
} Map;

static PyObject *map_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    static char *names[] = {"anchor", "address", "size", NULL};
    PyObject *anchor, *address;
    Py_ssize_t size;
    if (!PyArg_ParseTupleAndKeywords(args, named, "OO!n", names, &anchor, &PyLong_Type, &address, &size))
        return NULL;
    void *begin = PyLong_AsVoidPtr(address);
    if (begin == NULL && PyErr_Occurred())
        return NULL;
    if (begin == NULL || size < 0) {
        PyErr_SetString(PyExc_ValueError, "no address, or a negative size");
        return NULL;
    }
    Map *self = (Map *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL)
        return NULL;
    Py_INCREF(anchor);
    self->anchor = anchor;
    self->begin = begin;
    self->size = (size_t)size;
    return (PyObject *)self;
}

static void map_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(((Map *)object)->anchor);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyType_Slot map_slots[] = {
    {Py_tp_doc, "Map(anchor, address, size): writable memory, which ``anchor`` keeps where it is."},
    {Py_tp_new, map_new},
    {Py_tp_dealloc, map_dealloc},
    {0, NULL},
};
static PyType_Spec map_spec = {"torchobs._native.Map", sizeof(Map), 0, Py_TPFLAGS_DEFAULT, map_slots};

unsigned char *in_map(PyObject *object, size_t offset, size_t size)
{
    if (PyType_GetSlot(Py_TYPE(object), Py_tp_dealloc) != (void *)map_dealloc) {
        PyErr_SetString(PyExc_TypeError, "not a Map");
        return NULL;
    }
    const Map *self = (const Map *)object;
    if (self->size < size || offset > self->size - size || offset % size) {
        PyErr_SetString(PyExc_ValueError, "outside of the map, or not aligned");
        return NULL;
    }
    return self->begin + offset;
}

/* -- PlainSteps ------------------------------------------------------------------------------------------------------- */

struct PlainSteps {
    PyObject_HEAD
    PyObject *sequence, *memory, *recent, *append, *force, *reference;
    PyObject *map_type, *map_name, *store_name;
    size_t offset;
    uint64_t mask;
    Py_ssize_t forced_at;
    uint32_t seed;
    CrcTables tables;
};

static PyObject *plain_steps_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    static char *names[] = {
        "map_type", "sequence", "memory", "recent", "force", "reference", "offset", "mask", "forced_at", "seed", NULL,
    };
    PyObject *map_type, *sequence, *memory, *recent, *force, *reference;
    Py_ssize_t offset, mask, forced_at;
    unsigned long seed;
    if (!PyArg_ParseTupleAndKeywords(
            args, named, "OOOOOOnnnk", names, &map_type, &sequence, &memory, &recent, &force, &reference, &offset, &mask,
            &forced_at, &seed))
        return NULL;
    if (offset < 0 || mask < 0 || !PyIter_Check(sequence) || !PyType_Check(map_type)) {
        PyErr_SetString(PyExc_ValueError, "offset and mask are not negative, sequence is an iterator, map_type a type");
        return NULL;
    }
    PlainSteps *self = (PlainSteps *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL)
        return NULL;
    self->map_name = PyUnicode_InternFromString("map");
    self->store_name = PyUnicode_InternFromString("store");
    self->append = PyObject_GetAttrString(recent, "append");
    if (self->map_name == NULL || self->store_name == NULL || self->append == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    PyObject **held[] = {&self->map_type, &self->sequence, &self->memory, &self->recent, &self->force, &self->reference};
    PyObject *given[] = {map_type, sequence, memory, recent, force, reference};
    for (size_t index = 0; index < sizeof given / sizeof *given; index++) {
        Py_INCREF(given[index]);
        *held[index] = given[index];
    }
    self->offset = (size_t)offset;
    self->mask = (uint64_t)mask;
    self->forced_at = forced_at;
    self->seed = (uint32_t)seed;
    make_tables(self->tables);
    return (PyObject *)self;
}

static int plain_steps_traverse(PyObject *object, visitproc visit, void *arg)
{
    PlainSteps *self = (PlainSteps *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->map_type);
    Py_VISIT(self->sequence);
    Py_VISIT(self->memory);
    Py_VISIT(self->recent);
    Py_VISIT(self->append);
    Py_VISIT(self->force);
    Py_VISIT(self->reference);
    return 0;
}

static int plain_steps_clear(PyObject *object)
{
    PlainSteps *self = (PlainSteps *)object;
    Py_CLEAR(self->map_type);
    Py_CLEAR(self->sequence);
    Py_CLEAR(self->memory);
    Py_CLEAR(self->recent);
    Py_CLEAR(self->append);
    Py_CLEAR(self->force);
    Py_CLEAR(self->reference);
    return 0;
}

static void plain_steps_dealloc(PyObject *object)
{
    PlainSteps *self = (PlainSteps *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    plain_steps_clear(object);
    Py_CLEAR(self->map_name);
    Py_CLEAR(self->store_name);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

PyObject *call_with(PyObject *function, PyObject *const *args, Py_ssize_t count)
{
    PyObject *given = PyTuple_New(count);
    if (given == NULL)
        return NULL;
    for (Py_ssize_t index = 0; index < count; index++) {
        Py_INCREF(args[index]);
        PyTuple_SetItem(given, index, args[index]);
    }
    PyObject *result = PyObject_Call(function, given, NULL);
    Py_DECREF(given);
    return result;
}

/* Store the record: it is packed elsewhere and copied whole, by one of the two stores that the format allows. */
static int store(PlainSteps *self, uint64_t seq, PyObject *raw, const unsigned char *record)
{
    size_t offset = self->offset + (size_t)((seq - 1) & self->mask) * RECORD_SIZE;
    PyObject *map = PyObject_GetAttr(self->memory, self->map_name);
    if (map == NULL)
        return -1;
    if ((PyObject *)Py_TYPE(map) == self->map_type) {
        const Map *target = (const Map *)map; /* held until the end, whatever another thread makes of `memory` */
        int fits = target->size >= RECORD_SIZE && offset <= target->size - RECORD_SIZE;
        if (fits)
            memcpy(target->begin + offset, record, RECORD_SIZE);
        else
            PyErr_SetString(PyExc_ValueError, "the step ring is not within the map");
        Py_DECREF(map);
        return fits ? 0 : -1;
    }
    Py_DECREF(map);
    PyObject *at = PyLong_FromSize_t(offset);
    if (at == NULL)
        return -1;
    PyObject *done = PyObject_CallMethodObjArgs(self->memory, self->store_name, at, raw, NULL);
    Py_DECREF(at);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

int append_step(PlainSteps *self, const Step *step)
{
    PyObject *number = PyIter_Next(self->sequence);
    if (number == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_RuntimeError, "no more numbers");
        return -1;
    }
    uint64_t seq = as_uint64(number);
    Py_DECREF(number);
    if (seq == UINT64_MAX && PyErr_Occurred())
        return -1;
    unsigned char record[RECORD_SIZE];
    pack(record, seq, step, self->seed, self->tables);
    PyObject *raw = PyBytes_FromStringAndSize((const char *)record, RECORD_SIZE);
    if (raw == NULL)
        return -1;
    PyObject *kept = store(self, seq, raw, record) < 0
        ? NULL
        : PyObject_CallFunctionObjArgs(self->append, raw, NULL);
    Py_DECREF(raw);
    if (kept == NULL)
        return -1;
    Py_DECREF(kept);
    Py_ssize_t unfolded = PyObject_Size(self->recent);
    if (unfolded < 0)
        return -1;
    if (unfolded >= self->forced_at) {
        PyObject *forced = PyObject_CallObject(self->force, NULL);
        if (forced == NULL)
            return -1;
        Py_DECREF(forced);
    }
    return 0;
}

static PyObject *append_plain(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    PlainSteps *self = (PlainSteps *)object;
    Step step;
    if (count != 12)
        return call_with(self->reference, args, count);
    int plain = to_stamps(args[0], step.stamps);
    if (plain == 0)
        Py_RETURN_FALSE;
    if (plain < 0 || !to_unsigned(args[1], UINT64_MAX, &step.step) || !to_unsigned(args[2], UINT64_MAX, &step.end_ns)
        || !to_unsigned(args[3], UINT64_MAX, &step.begun_ns) || !to_unsigned(args[4], UINT16_MAX, &step.flags)
        || !to_unsigned(args[5], UINT32_MAX, &step.losses) || !to_double(args[6], &step.loss)
        || !to_double(args[7], &step.grad_norm) || !to_double(args[8], &step.learning_rate)
        || !to_unsigned(args[9], UINT64_MAX, &step.tokens) || !to_unsigned(args[10], UINT32_MAX, &step.samples)
        || !to_float(args[11], &step.norm_scale))
        return call_with(self->reference, args, count);
    if (append_step(self, &step) < 0)
        return NULL;
    Py_RETURN_TRUE;
}

PlainSteps *as_plain_steps(PyObject *object)
{
    int is = PyType_GetSlot(Py_TYPE(object), Py_tp_dealloc) == (void *)plain_steps_dealloc; /* nothing can inherit it */
    return is ? (PlainSteps *)object : NULL;
}

static PyMethodDef plain_steps_methods[] = {
    {"append_plain", (PyCFunction)(void (*)(void))append_plain, METH_FASTCALL, "As FlightWriter.append_plain."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot plain_steps_slots[] = {
    {Py_tp_doc, "Writes records of plain steps; its arguments are what ``FlightWriter._plain_appender`` has at hand."},
    {Py_tp_new, plain_steps_new},
    {Py_tp_traverse, plain_steps_traverse},
    {Py_tp_clear, plain_steps_clear},
    {Py_tp_dealloc, plain_steps_dealloc},
    {Py_tp_methods, plain_steps_methods},
    {0, NULL},
};
static PyType_Spec plain_steps_spec = {
    "torchobs._native.PlainSteps", sizeof(PlainSteps), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, plain_steps_slots,
};

/* -- boundaries, and the module --------------------------------------------------------------------------------------- */

uint64_t monotonic_ns(void)
{
#ifdef __APPLE__
    return clock_gettime_nsec_np(CLOCK_UPTIME_RAW); /* time.monotonic_ns is mach_absolute_time there */
#else
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
#endif
}

int stamp(PyObject *trace, uint64_t code)
{
    PyObject *made = PyLong_FromUnsignedLongLong(monotonic_ns() << 4 | code);
    if (made == NULL)
        return -1;
    int failed = PyList_Append(trace, made);
    Py_DECREF(made);
    return failed;
}

int add_type(PyObject *module, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type == NULL)
        return -1;
    int failed = PyModule_AddObjectRef(module, name, type);
    Py_DECREF(type);
    return failed;
}

static int fill(PyObject *module)
{
    if (add_type(module, "Map", &map_spec) < 0 || add_type(module, "PlainSteps", &plain_steps_spec) < 0)
        return -1;
    if (add_hooks(module) < 0 || add_signals(module) < 0)
        return -1;
    return PyModule_AddIntConstant(module, "INTERFACE", INTERFACE);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "torchobs._native", "See _native.c.", 0, NULL, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
