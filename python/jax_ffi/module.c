/* The Python module libflash._jax_ffi: the handlers for jax.ffi.register_ffi_target, and the check of a call by its shapes. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "dtype.h"
#include "handlers.h"
#include "request.h"

#define CAPSULE_NAME "xla._CUSTOM_CALL_TARGET" /* the name that XLA requires */

static const struct {
    const char *name, *platform;
    handler_t *handler;
} handlers[] = {
    {"libflash_forward", "cpu", forward_cpu},
    {"libflash_forward", "CUDA", forward_cuda},
    {"libflash_backward", "cpu", backward_cpu},
    {"libflash_backward", "CUDA", backward_cuda},
    {"libflash_decode", "cpu", decode_cpu},
    {"libflash_decode", "CUDA", decode_cuda},
    {"libflash_forward_tangent", "cpu", forward_tangent_cpu},
    {"libflash_forward_tangent", "CUDA", forward_tangent_cuda},
    {"libflash_backward_tangent", "cpu", backward_tangent_cpu},
    {"libflash_backward_tangent", "CUDA", backward_tangent_cuda},
    {"libflash_cache_write", "cpu", cache_write_cpu},
    {"libflash_cache_write", "CUDA", cache_write_cuda},
};

static PyObject *list_handlers(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < sizeof handlers / sizeof *handlers; i++) {
        void *pointer;
        memcpy(&pointer, &handlers[i].handler, sizeof pointer); /* C has no cast from function to object pointer */
        PyObject *capsule = PyCapsule_New(pointer, CAPSULE_NAME, NULL);
        PyObject *entry = capsule ? Py_BuildValue("(ssN)", handlers[i].name, handlers[i].platform, capsule) : NULL;
        if (!entry || PyList_Append(list, entry) != 0) Py_CLEAR(list);
        Py_XDECREF(entry);
    }
    return list;
}

/* `shape`: a tuple (XLA type code, (size, ...)). */
static int read_tensor(PyObject *shape, int32_t device_type, flash_tensor_t *tensor) {
    int code;
    PyObject *sizes;
    int64_t dims[FLASH_MAX_NDIM];
    if (!PyTuple_Check(shape)) {
        PyErr_SetString(PyExc_TypeError, "a shape must be a tuple (XLA type code, (size, ...))");
        return -1;
    }
    if (!PyArg_ParseTuple(shape, "iO!", &code, &PyTuple_Type, &sizes)) return -1;
    Py_ssize_t rank = PyTuple_Size(sizes);
    for (Py_ssize_t axis = 0; axis < rank && axis < FLASH_MAX_NDIM; axis++) {
        dims[axis] = PyLong_AsLongLong(PyTuple_GetItem(sizes, axis));
        if (dims[axis] == -1 && PyErr_Occurred()) return -1;
    }
    if (!describe_tensor(tensor, NULL, code, rank, dims)) {
        PyErr_Format(PyExc_ValueError,
                     "an array has %zd dimensions and XLA type %d; libflash has at most 4 dimensions and not every type", rank,
                     code);
        return -1;
    }
    tensor->device_type = device_type;
    return 0;
}

static int read_tensors(PyObject *shapes, int32_t device_type, tensors_t *tensors) {
    Py_ssize_t count = PyTuple_Size(shapes);
    if (count > MAX_TENSORS) {
        PyErr_Format(PyExc_ValueError, "%zd tensors; at most %d", count, MAX_TENSORS);
        return -1;
    }
    tensors->count = (int)count;
    for (Py_ssize_t i = 0; i < count; i++)
        if (read_tensor(PyTuple_GetItem(shapes, i), device_type, &tensors->items[i]) != 0) return -1;
    return 0;
}

static int read_attribute(const attribute_t *attribute, PyObject *value, attributes_t *attributes) {
    char *field = (char *)attributes + attribute->own.offset;
    if (attribute->kind == INTEGER) {
        int64_t number = PyLong_AsLongLong(value);
        memcpy(field, &number, sizeof number);
    } else if (attribute->kind == REAL) {
        double number = PyFloat_AsDouble(value);
        memcpy(field, &number, sizeof number);
    } else {
        Py_ssize_t length;
        const char *text = PyUnicode_AsUTF8AndSize(value, &length);
        if (!text) return -1;
        if ((size_t)length >= attribute->own.size) {
            PyErr_Format(PyExc_ValueError, "%s is longer than %zu bytes", attribute->name, attribute->own.size - 1);
            return -1;
        }
        memcpy(field, text, (size_t)length + 1);
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int read_attributes(PyObject *given, attributes_t *attributes) {
    for (const attribute_t *attribute = attribute_table; attribute->name; attribute++) {
        PyObject *value = PyDict_GetItemString(given, attribute->name);
        if (value && read_attribute(attribute, value, attributes) != 0) return -1;
    }
    return 0;
}

static PyObject *workspace_size(PyObject *self, PyObject *args) {
    int operation, device_type;
    PyObject *operands, *results, *attributes;
    request_t request;
    size_t bytes = 0;
    (void)self;
    memset(&request, 0, sizeof request);
    if (!PyArg_ParseTuple(args, "iiO!O!O!", &operation, &device_type, &PyTuple_Type, &operands, &PyTuple_Type, &results,
                          &PyDict_Type, &attributes))
        return NULL;
    if (operation < 0 || operation >= OPERATIONS)
        return PyErr_Format(PyExc_ValueError, "operation is %d; it must be 0 to %d", operation, OPERATIONS - 1);
    request.operation = (operation_t)operation;
    if (read_attributes(attributes, &request.attributes) != 0) return NULL;
    if (read_tensors(operands, device_type, &request.operands) != 0) return NULL;
    if (read_tensors(results, device_type, &request.results) != 0) return NULL;
    flash_status_t status = request_workspace_size(&request, &bytes);
    return Py_BuildValue("(isn)", (int)status, status == FLASH_STATUS_OK ? "" : request_error(&request), (Py_ssize_t)bytes);
}

static PyMethodDef methods[] = {
    {"handlers", list_handlers, METH_NOARGS, "handlers() -> [(target name, platform, capsule), ...]"},
    {"workspace_size", workspace_size, METH_VARARGS,
     "workspace_size(operation, device_type, operands, results, attributes) -> (status, text, bytes)\n\n"
     "Checks a call from its shapes. Operands and results are tuples of (XLA type code, (size, ...))."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    "_jax_ffi",
    "The handlers through which XLA calls libflash; used by libflash.jax.",
    0,
    methods,
    slots,
    NULL,
    NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__jax_ffi(void) { return PyModuleDef_Init(&module); }
