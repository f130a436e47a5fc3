/*
 * probe URL IDS MAX_TOKENS [NAME=VALUE ...]: one request, and a line for all that comes of it. Options and lines are
 * those of the Node client's probe.
 */
#include <deepinfer_client.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *given(int argc, char **argv, const char *name) {
  size_t size = strlen(name);
  for (int place = 4; place < argc; place++) {
    if (strncmp(argv[place], name, size) == 0 && argv[place][size] == '=') return argv[place] + size + 1;
  }
  return NULL;
}

static double number(int argc, char **argv, const char *name, double fallback) {
  const char *text = given(argc, argv, name);
  return text == NULL ? fallback : strtod(text, NULL);
}

static void print_chunk(const di_chunk *chunk) {
  printf("delta %d %d ", chunk->sample, chunk->index);
  for (size_t place = 0; place < chunk->num_tokens; place++) {
    printf("%s%d", place > 0 ? "," : "", chunk->token_ids[place]);
  }
  printf("%s %s\n", chunk->num_tokens == 0 ? "-" : "", chunk->reason == NULL ? "-" : chunk->reason);
  fflush(stdout);
}

static void print_end(di_status status, const di_error *error, const di_summary *summary) {
  if (status == DI_END) {
    printf("finish %s %d %d\n", summary->reason, summary->prompt_tokens, summary->generated_tokens);
  } else if (status == DI_LOST) {
    printf("error lost -\n");
  } else {
    printf("error %d %s\n", error->code, *error->field != 0 ? error->field : "-");
  }
}

int main(int argc, char **argv) {
  if (argc < 4) return fprintf(stderr, "usage: %s URL IDS MAX_TOKENS [NAME=VALUE ...]\n", argv[0]), 2;
  int32_t ids[1024];
  size_t num_ids = 0;
  for (char *text = strtok(argv[2], ","); text != NULL && num_ids < 1024; text = strtok(NULL, ",")) {
    ids[num_ids++] = atoi(text);
  }
  di_options options = di_options_default();
  options.token = given(argc, argv, "token");
  options.server_key = given(argc, argv, "server_key");
  options.public_key = given(argc, argv, "public_key");
  options.secret_key = given(argc, argv, "secret_key");
  options.window = (int32_t)number(argc, argv, "window", 1024);
  options.timeout_ms = (int32_t)number(argc, argv, "timeout_ms", 10000);
  options.give_up_ms = (int32_t)number(argc, argv, "give_up_ms", 30000);
  di_request request = di_request_default();
  request.token_ids = (di_ids){ids, num_ids};
  request.sampling.max_tokens = atoi(argv[3]);
  request.sampling.regex = given(argc, argv, "regex");
  request.sampling.ignore_eos = request.sampling.regex == NULL;
  request.sampling.n = (int64_t)number(argc, argv, "n", 1);
  request.sampling.temperature = number(argc, argv, "temperature", 0);
  request.not_resumable = number(argc, argv, "resumable", 1) == 0;
  int64_t cancel_after = (int64_t)number(argc, argv, "cancel_after", 1e18), num_read = 0;
  int delay_ms = (int)number(argc, argv, "delay_ms", 0);
  int32_t deadline_ms = -1;

  di_client *client = NULL;
  di_stream *stream = NULL;
  di_error error = {0};
  di_summary summary = {0};
  di_chunk chunk;
  di_status status = di_connect(argv[1], &options, &client, &error);
  if (status == DI_OK) status = di_submit(client, &request, &stream, &error);
  while (status == DI_OK && (status = di_next(stream, -1, &chunk)) == DI_OK) {
    print_chunk(&chunk);
    num_read += (int64_t)chunk.num_tokens;
    int32_t left_ms = di_client_deadline_ms(client);
    if (left_ms > deadline_ms) deadline_ms = left_ms;
    if (delay_ms > 0) di_poll(client, delay_ms);
    if (num_read >= cancel_after) di_cancel(stream);
  }
  if (stream != NULL) summary = di_stream_summary(stream);
  print_end(status, stream == NULL ? &error : di_stream_error(stream), &summary);
  printf("reconnects %d\n", client == NULL ? 0 : di_client_reconnects(client));
  if (deadline_ms < 0) printf("deadline -\n");
  else printf("deadline %d\n", deadline_ms);
  di_stream_free(stream);
  di_close(client);
  return 0;
}
