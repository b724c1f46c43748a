/* A plugin of QEMU that prints how many instructions the program executed. The functions and types are those of QEMU's plugin
 * interface, version 1; its header is rarely installed.
 *
 *     cc -shared -fPIC count_instructions.c -o count.so && qemu-aarch64 -plugin ./count.so -d plugin PROGRAM */
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>

#define EXPORT __attribute__((visibility("default")))

struct qemu_plugin_tb;
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, void (*callback)(uint64_t id, struct qemu_plugin_tb *block));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *block, int operation, void *counter, uint64_t value);
void qemu_plugin_register_atexit_cb(uint64_t id, void (*callback)(uint64_t id, void *data), void *data);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *block);
void qemu_plugin_outs(const char *text);

EXPORT int qemu_plugin_version = 1;

static uint64_t count;

/* Adds the number of its instructions whenever a translated block is executed. */
static void translated(uint64_t id, struct qemu_plugin_tb *block) {
    enum { kAdd = 0 };
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_inline(block, kAdd, &count, qemu_plugin_tb_n_insns(block));
}

static void finished(uint64_t id, void *data) {
    char text[64];
    (void)id, (void)data;
    snprintf(text, sizeof text, "instructions: %" PRIu64 "\n", count);
    qemu_plugin_outs(text);
}

EXPORT int qemu_plugin_install(uint64_t id, const void *info, int argc, char **argv) {
    (void)info, (void)argc, (void)argv;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, finished, NULL);
    return 0;
}
