// What both kernels of the chunked prefill know of the tiles between them; see chunked.py.
#pragma once

constexpr int D = 128, CHUNK = 64;  // channels of a head, tokens of a chunk
constexpr int PLACE = 3 * CHUNK * D + 2 * CHUNK * CHUNK, SCALES = D + CHUNK;  // elements a (chunk, head)

// Byte of 16-byte piece `piece` of row `row` in a tile with rows of 256 or 128 bytes: pieces are permuted by the row,
// as TMA's 128-byte swizzle does it, so that eight rows at one column never share a bank.
DEV int wide_at(int row, int piece) { return row * 256 + ((piece ^ (row & 7)) << 4); }
DEV int square_at(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }
