#ifndef DEEPINFER_REQUEST_H
#define DEEPINFER_REQUEST_H

#include "deepinfer_client.h"
#include <msgpack.h>

/* Appends the SUBMIT of `request` to `frame`. */
void di_pack_submit(const di_request *request, const char *id, int32_t credit, msgpack_sbuffer *frame);

#endif
