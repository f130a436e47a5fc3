/* stream URL PROMPT: print an answer as it comes. Ctrl-C ends the request. */
#include <deepinfer_client.h>
#include <signal.h>
#include <stdio.h>

static volatile sig_atomic_t is_interrupted;

static void interrupt(int number) {
  (void)number;
  is_interrupted = 1;
}

int main(int argc, char **argv) {
  if (argc != 3) return fprintf(stderr, "usage: %s URL PROMPT\n", argv[0]), 2;
  di_client *client;
  di_stream *stream = NULL;
  di_error error;
  if (di_connect(argv[1], NULL, &client, &error) != DI_OK) return fprintf(stderr, "%s\n", error.text), 1;
  signal(SIGINT, interrupt);

  di_request request = di_request_default();
  request.prompt = argv[2];
  request.sampling.max_tokens = 256;
  di_status status = di_submit(client, &request, &stream, &error);
  di_chunk tok;
  while (status == DI_OK || status == DI_TIMEOUT) {
    if (is_interrupted) di_cancel(stream);
    status = di_next(stream, 100, &tok);
    if (status == DI_OK) fwrite(tok.text, 1, tok.text_size, stdout), fflush(stdout);
  }
  if (status == DI_END) {
    di_summary summary = di_stream_summary(stream);
    printf("\n[%s, %d tokens]\n", summary.reason, summary.generated_tokens);
  } else {
    fprintf(stderr, "%s\n", stream == NULL ? error.text : di_stream_error(stream)->text);
  }
  di_stream_free(stream);
  di_close(client);
  return status != DI_END;
}
