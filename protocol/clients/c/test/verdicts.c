/* Lines of `SENDER HEX` on standard input: the verdict on each. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../src/wire.h"

int main(void) {
  char *line = NULL;
  size_t room = 0;
  while (getline(&line, &room, stdin) > 0) {
    line[strcspn(line, "\n")] = 0;
    di_sender sender = strncmp(line, "server ", 7) == 0 ? DI_FROM_SERVER : DI_FROM_CLIENT;
    const char *hex = line + strcspn(line, " ") + 1;
    size_t size = strlen(hex) / 2;
    uint8_t *frame = malloc(size + 1); /* of its size: to read beyond it is seen by a sanitizer */
    for (size_t place = 0; place < size; place++) {
      unsigned byte;
      sscanf(hex + 2 * place, "%2x", &byte);
      frame[place] = (uint8_t)byte;
    }
    di_message message;
    di_fault fault;
    di_verdict verdict = di_decode(sender, frame, size, &message, &fault);
    if (verdict == DI_V_OK) di_message_free(&message);
    puts(di_verdict_name(verdict));
    free(frame);
  }
  free(line);
  return 0;
}
