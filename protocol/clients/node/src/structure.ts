/**
 * What holds of every frame before its fields are looked at: docs/wire.md, "Encoding". A walk over msgpack, no values.
 *
 * A msgpack library is more lenient: it takes keys twice, broken UTF-8, extensions and any depth.
 */

export const MAX_FRAME_BYTES = 4 * 1024 * 1024;
const MAX_DEPTH = 32;
const MAX_ITEMS = 16_384;
const MAX_KEY_BYTES = 256;

export class StructureError extends Error {}

const utf8 = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true });

/** A map or an array that is open: how many values it has, how many are still to come, the keys of a map so far. */
interface Level {
  readonly size: number;
  left: number;
  readonly keys: Set<string> | null;
  key: string;
}

/** Where a value is: keys of maps and places in arrays, from the message inwards. */
export type Path = ReadonlyArray<string | number>;

/**
 * Throws `StructureError` for what no message is built like. Returns where floats are that have whole values: msgpack
 * libraries for JavaScript do not tell them from whole numbers.
 */
export function checkStructure(frame: Uint8Array): Path[] {
  const first = frame[0];
  if (first === undefined || !((first & 0xf0) === 0x80 || first === 0xde || first === 0xdf)) {
    throw new StructureError('not a map');
  }
  return new Walk(frame).run();
}

/** Of the value that was read last. */
function place(level: Level): string | number {
  return level.keys === null ? level.size - level.left - 1 : level.key;
}

class Walk {
  private readonly view: DataView;
  private at = 0;
  private isWholeFloat = false;

  constructor(private readonly frame: Uint8Array) {
    this.view = new DataView(frame.buffer, frame.byteOffset, frame.byteLength);
  }

  run(): Path[] {
    const levels: Level[] = [];
    const wholeFloats: Path[] = [];
    let level: Level = { size: 1, left: 1, keys: null, key: '' };
    for (let items = 1; ; items++) {
      while (level.left === 0) {
        const outer = levels.pop();
        if (outer === undefined) {
          if (this.at !== this.frame.length) throw new StructureError('bytes follow the message');
          return wholeFloats;
        }
        level = outer;
      }
      level.left -= 1;
      if (items > MAX_ITEMS) throw new StructureError(`more than ${MAX_ITEMS} values`);
      if (level.keys !== null && level.left % 2 === 1) {
        level.key = this.key(level.keys);
        continue;
      }
      const branch = this.value(levels.length === 1);
      if (this.isWholeFloat) {
        wholeFloats.push([...levels.slice(1), level].map(place));
        this.isWholeFloat = false;
      }
      if (branch !== null) {
        if (levels.length >= MAX_DEPTH) throw new StructureError(`deeper than ${MAX_DEPTH}`);
        levels.push(level);
        level = branch;
      }
    }
  }

  /** The map or array that begins here; null: it was a scalar, and is behind us. */
  private value(mayBeBytes: boolean): Level | null {
    const byte = this.number(1);
    if (byte < 0x80 || byte >= 0xe0) return null;
    if (byte < 0x90) return this.branch(byte & 0x0f, true);
    if (byte < 0xa0) return this.branch(byte & 0x0f, false);
    if (byte < 0xc0) return this.text(byte & 0x1f);
    switch (byte) {
      case 0xc0: // nil
      case 0xc2:
      case 0xc3:
        return null;
      case 0xc4:
      case 0xc5:
      case 0xc6: {
        if (!mayBeBytes) throw new StructureError('bytes are no field of the message itself');
        this.skip(this.number(1 << (byte - 0xc4)));
        return null;
      }
      case 0xca:
      case 0xcb: {
        const start = this.skip(byte === 0xca ? 4 : 8);
        const value = byte === 0xca ? this.view.getFloat32(start) : this.view.getFloat64(start);
        if (!Number.isFinite(value)) throw new StructureError('a number is not finite');
        this.isWholeFloat = Number.isInteger(value);
        return null;
      }
      case 0xcc:
      case 0xcd:
      case 0xce:
      case 0xd0:
      case 0xd1:
      case 0xd2:
      case 0xd3: {
        this.skip(1 << (byte & 0x03));
        return null;
      }
      case 0xcf: {
        const start = this.skip(8);
        if (this.view.getUint8(start) >= 0x80) throw new StructureError('a number of 64 bits without a sign');
        return null;
      }
      case 0xd9:
      case 0xda:
      case 0xdb:
        return this.text(this.number(1 << (byte - 0xd9)));
      case 0xdc:
      case 0xdd:
        return this.branch(this.number(2 << (byte - 0xdc)), false);
      case 0xde:
      case 0xdf:
        return this.branch(this.number(2 << (byte - 0xde)), true);
      default:
        throw new StructureError('an extension, or a byte that msgpack does not have');
    }
  }

  private branch(length: number, isMap: boolean): Level {
    const left = isMap ? 2 * length : length;
    if (left > this.frame.length - this.at) throw new StructureError('it ends early');
    return { size: left, left, keys: isMap ? new Set() : null, key: '' };
  }

  private key(keys: Set<string>): string {
    const byte = this.number(1);
    let length: number;
    if ((byte & 0xe0) === 0xa0) length = byte & 0x1f;
    else if (byte >= 0xd9 && byte <= 0xdb) length = this.number(1 << (byte - 0xd9));
    else throw new StructureError('a key is no text');
    if (length > MAX_KEY_BYTES) throw new StructureError(`a key of more than ${MAX_KEY_BYTES} bytes`);
    const start = this.skip(length);
    const key = this.decode(start, length);
    if (keys.has(key)) throw new StructureError('a key is there twice');
    keys.add(key);
    return key;
  }

  private text(length: number): null {
    this.decode(this.skip(length), length);
    return null;
  }

  private decode(start: number, length: number): string {
    try {
      return utf8.decode(this.frame.subarray(start, start + length));
    } catch {
      throw new StructureError('text is no UTF-8');
    }
  }

  /** An unsigned number of `width` bytes, at most 4. */
  private number(width: number): number {
    const start = this.skip(width);
    if (width === 1) return this.view.getUint8(start);
    return width === 2 ? this.view.getUint16(start) : this.view.getUint32(start);
  }

  /** Where the `length` bytes began that are behind us now. */
  private skip(length: number): number {
    const start = this.at;
    if (length > this.frame.length - start) throw new StructureError('it ends early');
    this.at = start + length;
    return start;
  }
}
