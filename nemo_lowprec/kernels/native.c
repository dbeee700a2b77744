/* Launches a Triton kernel, or a GEMM of cuBLASLt, in one call from Python.

   The addresses of the functions to call, and the objects of CUDA and cuBLASLt, come from Python as integers, so that
   neither's headers are needed. Tensors are passed as such, or by their addresses.

   All functions hold the GIL, so that no other thread sets the addresses of a GEMM before the GEMM is launched. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define MOST_ARGUMENTS 48

/* cuLaunchKernel of cuda.h */
typedef int (*launch_function)(void *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **arguments,
                               void **extra);
/* cublasLtMatmul and cublasLtMatmulDescSetAttribute of cublasLt.h */
typedef int (*matmul_function)(void *handle, void *description, const void *alpha, const void *a, void *layout_a,
                               const void *b, void *layout_b, const void *beta, const void *c, void *layout_c,
                               void *out, void *layout_out, const void *algorithm, void *workspace, size_t size,
                               void *stream);
typedef int (*set_function)(void *description, int attribute, const void *value, size_t size);

enum { BIAS = 8, A_SCALE = 17, B_SCALE = 18 };

typedef struct {
    launch_function launch;
    void *kernel;
    unsigned block, shared;
    Py_ssize_t count;
    char kinds[MOST_ARGUMENTS + 1];
} Kernel;

typedef struct {
    matmul_function matmul;
    set_function set;
    void *handle, *description, *layout_a, *layout_b, *layout_out;
    uint64_t algorithm[8];
    size_t workspace;
} Gemm;

static PyObject *data_ptr;

/* The address that an argument stands for: an integer, None for 0, or a tensor. -1 with an exception for others. */
static uint64_t address_of(PyObject *argument) {
    if (PyLong_Check(argument)) return PyLong_AsUnsignedLongLong(argument);
    if (argument == Py_None) return 0;
    PyObject *found = PyObject_CallMethodNoArgs(argument, data_ptr);
    if (!found) return (uint64_t)-1;
    uint64_t address = PyLong_AsUnsignedLongLong(found);
    Py_DECREF(found);
    return address;
}

static void free_capsule(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, NULL)); }

static PyObject *in_capsule(const void *value, size_t size) {
    void *kept = PyMem_Malloc(size);
    if (!kept) return PyErr_NoMemory();
    memcpy(kept, value, size);
    PyObject *capsule = PyCapsule_New(kept, NULL, free_capsule);
    if (!capsule) PyMem_Free(kept);
    return capsule;
}

static PyObject *new_kernel(PyObject *module, PyObject *args) {
    Kernel made = {0};
    unsigned long long launch, kernel;
    const char *kinds;
    if (!PyArg_ParseTuple(args, "KKIIs#", &launch, &kernel, &made.block, &made.shared, &kinds, &made.count)) return NULL;
    if (made.count > MOST_ARGUMENTS) return PyErr_Format(PyExc_ValueError, "a kernel of %zd arguments", made.count);
    made.launch = (launch_function)(uintptr_t)launch;
    made.kernel = (void *)(uintptr_t)kernel;
    memcpy(made.kinds, kinds, made.count);
    return in_capsule(&made, sizeof made);
}

static PyObject *launch(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Kernel *kernel = count ? PyCapsule_GetPointer(args[0], NULL) : NULL;
    if (!kernel) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "a kernel is missing");
    if (count != kernel->count + 3)
        return PyErr_Format(PyExc_TypeError, "%zd arguments in the place of %zd", count - 3, kernel->count);
    unsigned programs = (unsigned)PyLong_AsUnsignedLong(args[1]);
    void *stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(args[2]);
    union { uint64_t address; int64_t wide; int32_t narrow; float number; } values[MOST_ARGUMENTS + 2];
    void *places[MOST_ARGUMENTS + 2];
    Py_ssize_t used = 0;
    for (Py_ssize_t i = 0; i < kernel->count; i++) {
        PyObject *argument = args[i + 3];
        switch (kernel->kinds[i]) {
            case 'p': values[used].address = address_of(argument); break;
            case 'i': values[used].narrow = (int32_t)PyLong_AsLong(argument); break;
            case 'l': values[used].wide = PyLong_AsLongLong(argument); break;
            case 'f': values[used].number = (float)PyFloat_AsDouble(argument); break;
            default: continue; /* a constant of the kernel */
        }
        places[used] = &values[used];
        used++;
    }
    for (int scratch = 0; scratch < 2; scratch++, used++) { /* two addresses that Triton's kernels end with */
        values[used].address = 0;
        places[used] = &values[used];
    }
    if (PyErr_Occurred()) return NULL;
    int status = programs ? kernel->launch(kernel->kernel, programs, 1, 1, kernel->block, 1, 1, kernel->shared, stream,
                                           places, NULL) : 0;
    if (status) return PyErr_Format(PyExc_RuntimeError, "cuLaunchKernel has failed with status %d", status);
    Py_RETURN_NONE;
}

static PyObject *new_gemm(PyObject *module, PyObject *args) {
    unsigned long long matmul, set, handle, description, layout_a, layout_b, layout_out, algorithm;
    Py_ssize_t workspace;
    if (!PyArg_ParseTuple(args, "KKKKKKKKn", &matmul, &set, &handle, &description, &layout_a, &layout_b, &layout_out,
                          &algorithm, &workspace)) return NULL;
    Gemm made = {
        (matmul_function)(uintptr_t)matmul, (set_function)(uintptr_t)set, (void *)(uintptr_t)handle,
        (void *)(uintptr_t)description, (void *)(uintptr_t)layout_a, (void *)(uintptr_t)layout_b,
        (void *)(uintptr_t)layout_out, {0}, (size_t)workspace,
    };
    memcpy(made.algorithm, (void *)(uintptr_t)algorithm, sizeof made.algorithm);
    return in_capsule(&made, sizeof made);
}

/* (gemm, a, b, scale of a, scale of b, bias, out, whether it adds, workspace, stream) to cuBLASLt's status. cuBLASLt
   reads matrices in column-major order, so that its A is our b. */
static PyObject *gemm(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (count != 10) return PyErr_Format(PyExc_TypeError, "%zd arguments in the place of 10", count);
    Gemm *gemm = PyCapsule_GetPointer(args[0], NULL);
    if (!gemm) return NULL;
    uint64_t a = address_of(args[1]), b = address_of(args[2]), scale_a = address_of(args[3]);
    uint64_t scale_b = address_of(args[4]), bias = address_of(args[5]), out = address_of(args[6]);
    float one = 1, beta = (float)PyObject_IsTrue(args[7]);
    uint64_t workspace = address_of(args[8]), stream = address_of(args[9]);
    if (PyErr_Occurred()) return NULL;
    int status = gemm->set(gemm->description, A_SCALE, &scale_b, sizeof scale_b);
    if (!status) status = gemm->set(gemm->description, B_SCALE, &scale_a, sizeof scale_a);
    if (!status && bias) status = gemm->set(gemm->description, BIAS, &bias, sizeof bias);
    if (!status)
        status = gemm->matmul(gemm->handle, gemm->description, &one, (void *)(uintptr_t)b, gemm->layout_a,
                              (void *)(uintptr_t)a, gemm->layout_b, &beta, (void *)(uintptr_t)out, gemm->layout_out,
                              (void *)(uintptr_t)out, gemm->layout_out, gemm->algorithm, (void *)(uintptr_t)workspace,
                              gemm->workspace, (void *)(uintptr_t)stream);
    return PyLong_FromLong(status);
}

static PyMethodDef methods[] = {
    {"new_kernel", new_kernel, METH_VARARGS,
     "(cuLaunchKernel, kernel, threads of a block, bytes of shared memory, kinds of the arguments) to a kernel.\n\n"
     "A kind is p for a pointer, i and l for integers of 32 and 64 bits, f for FP32; any other one is not passed on."},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, "(kernel, size of the grid, stream, arguments ...)."},
    {"new_gemm", new_gemm, METH_VARARGS,
     "(cublasLtMatmul, cublasLtMatmulDescSetAttribute, handle, description, layouts of A, B and the result, the\n"
     "algorithm's address, bytes of workspace) to a GEMM."},
    {"gemm", (PyCFunction)(void (*)(void))gemm, METH_FASTCALL,
     "(GEMM, a, b, 1 / scale of a, of b, bias or 0, result, whether it adds, workspace, stream) to cuBLASLt's status."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "nemo_lowprec_native", NULL, -1, methods};

PyMODINIT_FUNC PyInit_nemo_lowprec_native(void) {
    data_ptr = PyUnicode_InternFromString("data_ptr");
    return data_ptr ? PyModule_Create(&definition) : NULL;
}
