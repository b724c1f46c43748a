/* The table of the attributes of a request, and the option structs in which each attribute is a field. */
#include <string.h>

#include "request.h"

#define FIELD(type, field) {offsetof(type, field), sizeof(((type *)0)->field)}
#define NO_FIELD {0, 0}
#define ATTENTION(field) FIELD(flash_attention_options_t, field)
#define DECODE_FIELD(field) FIELD(flash_decode_options_t, field)
#define WRITE_FIELD(field) FIELD(flash_cache_write_options_t, field)
#define OF_REQUEST(field, kind) {#field, kind, FIELD(attributes_t, field), NO_FIELD, NO_FIELD, NO_FIELD}
#define OF_ATTENTION(field, kind) {#field, kind, FIELD(attributes_t, field), ATTENTION(field), NO_FIELD, NO_FIELD}
#define OF_DECODE(field, kind) {#field, kind, FIELD(attributes_t, field), NO_FIELD, DECODE_FIELD(field), NO_FIELD}
#define OF_BOTH(field, kind) {#field, kind, FIELD(attributes_t, field), ATTENTION(field), DECODE_FIELD(field), NO_FIELD}
#define OF_ALL(field, kind) {#field, kind, FIELD(attributes_t, field), ATTENTION(field), DECODE_FIELD(field), WRITE_FIELD(field)}

const attribute_t attribute_table[] = {
    OF_REQUEST(operands, INTEGER),
    OF_REQUEST(layout, INTEGER),
    OF_REQUEST(head_dim_v, INTEGER),
    OF_ALL(flags, INTEGER),
    OF_ALL(num_threads, INTEGER),
    OF_BOTH(window_left, INTEGER),
    OF_BOTH(window_right, INTEGER),
    OF_BOTH(softmax_scale, REAL),
    OF_BOTH(softcap, REAL),
    OF_ATTENTION(dropout_p, REAL),
    OF_ATTENTION(seed, INTEGER),
    OF_ATTENTION(offset, INTEGER),
    OF_ATTENTION(max_seqlen_q, INTEGER),
    OF_ATTENTION(max_seqlen_k, INTEGER),
    OF_BOTH(num_splits, INTEGER),
    OF_DECODE(split_size, INTEGER),
    OF_ATTENTION(head_begin, INTEGER),
    OF_ATTENTION(heads_total, INTEGER),
    OF_DECODE(shard_count, INTEGER),
    OF_DECODE(shard_index, INTEGER),
    OF_DECODE(shard_keys, INTEGER),
    OF_ALL(backend, TEXT),
    OF_ALL(kernel, TEXT),
    {NULL, INTEGER, NO_FIELD, NO_FIELD, NO_FIELD, NO_FIELD},
};

const attribute_t *find_attribute(const char *name, size_t length) {
    for (const attribute_t *attribute = attribute_table; attribute->name; attribute++)
        if (strlen(attribute->name) == length && memcmp(attribute->name, name, length) == 0) return attribute;
    return NULL;
}
