/** What can go wrong with a request or a connection. */

import type { ErrorMessage, Reject } from './types.js';

/** The server refused a request, or ended it. `code` is one of the numbers in docs/wire.md, "Errors". */
export class ServerError extends Error {
  override readonly name: string = 'ServerError';
  readonly code: number;
  /** Such as `E_INVALID_PARAM`. */
  readonly codeName: string;
  /** The same request may succeed later, not before `retryAfterMs`. */
  readonly retryable: boolean;
  readonly retryAfterMs: number;
  /** The parameter at fault, such as `top_p`; may be empty. */
  readonly field: string;

  constructor(said: ErrorMessage | Reject) {
    const detail = 'detail' in said ? said.detail : '';
    super([said.name, said.text, detail].filter(Boolean).join(': '));
    this.code = said.code;
    this.codeName = said.name;
    this.retryable = said.retryable;
    this.retryAfterMs = said.retry_after_ms;
    this.field = 'field' in said ? said.field : '';
  }
}

/** The server does not want this client. */
export class ConnectionRejected extends ServerError {
  override readonly name = 'ConnectionRejected';
}

/** The server is out of reach, or was restarted, and what was open cannot go on. */
export class ConnectionLost extends Error {
  override readonly name = 'ConnectionLost';
}

/** The client is closed. */
export class ClientClosed extends Error {
  override readonly name = 'ClientClosed';
}
