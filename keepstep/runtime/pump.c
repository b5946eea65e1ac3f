/* Moves chunks around a ring without the interpreter: what `runtime/two_threads.py` does in Python, in one thread and one call.
 *
 * The protocol is the same (see `runtime/links.py`), so members with and without this file share a ring. It decides nothing:
 * the schedule comes from `protocol.ring`, and whatever is not an expected chunk, a heartbeat or a credit is handed back to
 * Python. A chunk is sent on only when it is whole, so that a member that freezes in the middle of one silences nobody else.
 *
 * All sums keep the order "what came + our own"; inputs are never written (they may be the output itself, for work in place).
 * Plain C11 with Linux sockets, no Python API; `runtime/native.py` has the same structures as ctypes, and calls `pump_run`.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#define HEADER_BYTES 40
#define HEARTBEAT 0xFFFFFFFFu
#define PIECE (256 << 10) /* bytes read, added or copied at a time: they stay in the cache */

enum { TICK, WOKEN, SENT_ALL, RECEIVED_ALL, HEADER, BACKWARDS, IN_FAILED, OUT_FAILED, CALLBACK_FAILED, BAD_CHECKSUM, STOPPED };
enum { PREPARE, REDUCE, FINAL, CHUNK };                                   /* what Python is asked to do */
enum { BY_PYTHON, F32, F64, I8, I16, I32, I64, F32_BF16, F32_F16 };       /* how to add: what travels, and what our own is */

typedef struct { int64_t lo, hi, after; } send_chunk;           /* after: number of the receive that completes it; -1: our own input */
typedef struct { int64_t lo, hi; int32_t reduce, final; } receive_chunk;
typedef struct { uint64_t quorum, seq; uint32_t exchange, number, length, unused; uint64_t checksum; } header;

typedef struct exchange {
    const uint8_t *input;
    uint8_t *output;
    const send_chunk *sends;
    const receive_chunk *receives;
    uint64_t *checksums; /* of the chunks received, for those that go on unchanged */
    struct exchange *next_send, *next_receive;
    int64_t n_sends, n_receives, sent, received, granted, window;
    uint64_t seq;
    uint32_t number;
    int32_t kind, prepare, tell_final;
} exchange;

typedef struct {
    int32_t in, out, wake; /* descriptors; -1: not there any more */
    int32_t attention;     /* set by another thread: come back soon */
    int32_t stopping;      /* begin nothing new, end between two chunks */
    int32_t checked;       /* chunks get checksums */
    int32_t raw_back;      /* Python reads all that comes back, since it has the beginning of something */
    int32_t tell_chunks;   /* a fault may have to be injected */
    int32_t heartbeat;     /* send one if nothing else is being sent */
    int32_t error;         /* errno of what failed; 0: the other end closed the connection */
    int64_t patience_ms;   /* TICK after so long without work */
    int64_t heard_ms, taken_ms; /* CLOCK_MONOTONIC at the last byte, and at the last whole chunk, from the previous member */
    uint64_t quorum;
    exchange *to_send, *to_receive;
    int64_t credits, owed; /* to send with; to be told to the previous member */
    uint8_t *in_slots, *out_slots; /* shared memory, or NULL */
    int64_t slot_bytes, slots;
    uint64_t chunks_in, chunks_out, bytes_out;
    uint8_t *stage; /* a whole chunk */
    uint64_t (*hash)(const void *, size_t);
    int32_t (*python)(int32_t what, int64_t lo, int64_t hi, void *data);
    const uint8_t *prepared; /* what PREPARE has found */
    header in_header, out_header;
    int64_t in_header_at, body_at;                        /* body_at -1: no chunk is being received */
    int64_t out_header_at, body_out_at, body_out_bytes;   /* out_header_at -1: nothing is being sent */
    const uint8_t *body_out;
    int32_t sends_chunk; /* what is being sent is a chunk, not a heartbeat */
    int32_t back_bytes;
    uint8_t back[256];
} pump;

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int64_t pump_sizes(int which) { return which == 0 ? sizeof(pump) : which == 1 ? sizeof(exchange) : sizeof(header); }

/* --- additions ---------------------------------------------------------------------------------------------------- */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#else
#define FAST
#endif

#define ADD(NAME, T, OWN, VALUE)                                                                      \
    FAST static void NAME(T *out, const T *came, const OWN *own, int64_t n) {                         \
        _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) out[i] = (T)(came[i] + VALUE(own[i]));  \
    }

static inline float of_bf16(uint16_t half) {
    union { uint32_t bits; float value; } both = {(uint32_t)half << 16};
    return both.value;
}
#define PLAIN(x) (x)
ADD(add_f32, float, float, PLAIN)
ADD(add_f64, double, double, PLAIN)
ADD(add_i8, uint8_t, uint8_t, PLAIN) /* unsigned: overflow wraps, as in torch */
ADD(add_i16, uint16_t, uint16_t, PLAIN)
ADD(add_i32, uint32_t, uint32_t, PLAIN)
ADD(add_i64, uint64_t, uint64_t, PLAIN)
ADD(add_bf16, float, uint16_t, of_bf16)
#ifdef __FLT16_MANT_DIG__
ADD(add_f16, float, _Float16, (float))
#define HAS_F16 1
#else
#define HAS_F16 0
#endif

int32_t pump_adds(int32_t kind) { return kind > BY_PYTHON && (kind < F32_F16 || (kind == F32_F16 && HAS_F16)); }

static int64_t itemsize(int32_t kind) {
    return kind == F64 || kind == I64 ? 8 : kind == I8 ? 1 : kind == I16 ? 2 : 4;
}

/* out = came + our own input from byte `lo` of the exchange on */
static void add(const exchange *x, uint8_t *out, const uint8_t *came, int64_t lo, int64_t bytes) {
    int64_t n = bytes / itemsize(x->kind);
    const uint8_t *own = x->input + (x->kind == F32_BF16 || x->kind == F32_F16 ? lo / 2 : lo);
    switch (x->kind) {
    case F32: add_f32((float *)out, (const float *)came, (const float *)own, n); break;
    case F64: add_f64((double *)out, (const double *)came, (const double *)own, n); break;
    case I8: add_i8(out, came, own, n); break;
    case I16: add_i16((uint16_t *)out, (const uint16_t *)came, (const uint16_t *)own, n); break;
    case I32: add_i32((uint32_t *)out, (const uint32_t *)came, (const uint32_t *)own, n); break;
    case I64: add_i64((uint64_t *)out, (const uint64_t *)came, (const uint64_t *)own, n); break;
    case F32_BF16: add_bf16((float *)out, (const float *)came, (const uint16_t *)own, n); break;
#if HAS_F16
    case F32_F16: add_f16((float *)out, (const float *)came, (const _Float16 *)own, n); break;
#endif
    }
}

/* --- sending ------------------------------------------------------------------------------------------------------ */

enum { WAITS = -1, MOVED = -2 }; /* what a step says, beside an event for Python */

/* Reads what has come back: credits, or something for Python. */
static int take_credits(pump *p) {
    ssize_t got = recv(p->out, p->back, sizeof p->back, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return WAITS;
    if (got <= 0) {
        p->error = got < 0 ? errno : 0;
        return OUT_FAILED;
    }
    int64_t credits = 0;
    while (credits < got && p->back[credits] == 'c') credits++;
    if (credits < got || p->raw_back) {
        p->back_bytes = (int32_t)got;
        return BACKWARDS;
    }
    p->credits += credits;
    return MOVED;
}

static void announce(pump *p, const exchange *x, int64_t length, uint64_t checksum) {
    p->out_header = (header){p->quorum, x->seq, x->number, (uint32_t)x->sent, (uint32_t)length, 0, checksum};
    p->out_header_at = p->body_out_at = 0;
    p->sends_chunk = 1;
    p->credits--;
}

/* Begins the next chunk, if it is complete and has a credit. */
static int begin_send(pump *p, int *hungry) {
    exchange *x = p->to_send;
    if (p->heartbeat) {
        p->heartbeat = 0;
        p->out_header = (header){p->quorum, 0, 0, HEARTBEAT, 0, 0, 0};
        p->out_header_at = p->body_out_at = p->body_out_bytes = p->sends_chunk = 0;
        return MOVED;
    }
    if (!x || p->stopping) return WAITS;
    const send_chunk *s = &x->sends[x->sent];
    if (s->after >= x->received) return WAITS;
    if (p->credits == 0) {
        int what = take_credits(p);
        *hungry = p->credits == 0;
        if (what != MOVED || *hungry) return what;
    }
    int64_t length = s->hi - s->lo;
    const uint8_t *source = s->after < 0 ? x->input + s->lo : x->output + s->lo;
    if (s->after < 0 && x->prepare) {
        if (p->python(PREPARE, s->lo, s->hi, NULL)) return CALLBACK_FAILED;
        source = p->prepared;
    }
    uint64_t checksum = 0;
    if (p->checked) {
        checksum = s->after < 0 ? 0 : x->checksums[s->after];
        if (!checksum) checksum = p->hash(source, (size_t)length);
    }
    p->body_out = source;
    p->body_out_bytes = p->out_slots ? 0 : length;
    if (p->out_slots) memcpy(p->out_slots + p->chunks_out % (uint64_t)p->slots * p->slot_bytes, source, (size_t)length);
    announce(p, x, length, checksum);
    return MOVED;
}

static int send_some(pump *p, int *hungry, int *blocked) {
    if (p->out_header_at < 0) {
        int what = begin_send(p, hungry);
        if (what != MOVED) return what;
    }
    struct iovec parts[2] = {
        {(uint8_t *)&p->out_header + p->out_header_at, (size_t)(HEADER_BYTES - p->out_header_at)},
        {(uint8_t *)p->body_out + p->body_out_at, (size_t)(p->body_out_bytes - p->body_out_at)},
    };
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = p->body_out_bytes > p->body_out_at ? 2 : 1};
    ssize_t sent = sendmsg(p->out, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
        if (errno == EINTR) return MOVED;
        if (errno == EAGAIN) {
            *blocked = 1;
            return WAITS;
        }
        p->error = errno;
        return OUT_FAILED;
    }
    p->bytes_out += (uint64_t)sent;
    int64_t of_header = sent < HEADER_BYTES - p->out_header_at ? sent : HEADER_BYTES - p->out_header_at;
    p->out_header_at += of_header;
    p->body_out_at += sent - of_header;
    if (p->out_header_at < HEADER_BYTES || p->body_out_at < p->body_out_bytes) return MOVED;
    p->out_header_at = -1;
    if (!p->sends_chunk) return MOVED;
    p->chunks_out++;
    exchange *x = p->to_send;
    if (++x->sent < x->n_sends) return MOVED;
    p->to_send = x->next_send;
    return SENT_ALL;
}

/* --- receiving ---------------------------------------------------------------------------------------------------- */

/* `protocol.exchange.Exchange.grant`: up to `window` chunks ahead of what is received, half a window at a time. */
static int grant(pump *p) {
    exchange *x = p->to_receive;
    if (x && !p->stopping) {
        int64_t upto = x->received + x->window < x->n_receives ? x->received + x->window : x->n_receives;
        int64_t fresh = upto - x->granted;
        if (fresh && (fresh >= x->window / 2 || upto == x->n_receives)) {
            x->granted = upto;
            p->owed += fresh;
        }
    }
    while (p->owed) {
        char credits[64];
        size_t count = p->owed < 64 ? (size_t)p->owed : 64;
        memset(credits, 'c', count);
        ssize_t sent = send(p->in, credits, count, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN) return WAITS;
        if (sent < 0 && errno != EINTR) {
            p->error = errno;
            return IN_FAILED;
        }
        if (sent > 0) p->owed -= sent;
    }
    return WAITS;
}

static ssize_t read_some(pump *p, void *target, int64_t bytes) {
    ssize_t got = recv(p->in, target, (size_t)bytes, MSG_DONTWAIT);
    if (got > 0) p->heard_ms = now_ms();
    if (got < 0 && errno == EINTR) errno = EAGAIN;
    if (got <= 0) p->error = got < 0 ? errno : 0;
    return got;
}

/* Whether the chunk that is being received is the next to be sent, and may be written into its slot right now. */
static int goes_on(pump *p, const exchange *x) {
    if (!p->out_slots || p->out < 0 || p->out_header_at >= 0 || p->stopping || p->to_send != x) return 0;
    if (x->sends[x->sent].after != x->received) return 0;
    if (p->credits == 0 && take_credits(p) != MOVED) return 0; /* what it says else is read again by begin_send */
    return p->credits > 0;
}

/* A chunk lies at `came`, whole: adds it up or puts it in its place, and into the next slot if it goes on at once. */
static int take(pump *p, exchange *x, const receive_chunk *r, const uint8_t *came) {
    int64_t length = r->hi - r->lo, onwards = goes_on(p, x);
    uint8_t *slot = onwards ? p->out_slots + p->chunks_out % (uint64_t)p->slots * p->slot_bytes : NULL, *output = x->output + r->lo;
    if (p->back_bytes) return BACKWARDS;
    if (r->reduce && x->kind == BY_PYTHON) {
        if (p->python(REDUCE, r->lo, r->hi, (void *)came)) return CALLBACK_FAILED;
        if (slot) memcpy(slot, output, (size_t)length);
    } else if (r->reduce && slot && !r->final) {
        add(x, slot, came, r->lo, length);
    } else {
        for (int64_t at = 0; at < length; at += PIECE) {
            int64_t bytes = length - at < PIECE ? length - at : PIECE;
            if (r->reduce)
                add(x, output + at, came + at, r->lo + at, bytes);
            else
                memcpy(output + at, came + at, (size_t)bytes);
            if (slot) memcpy(slot + at, output + at, (size_t)bytes);
        }
    }
    if (onwards) {
        p->body_out_bytes = 0;
        announce(p, x, length, 0);
    }
    return MOVED;
}

static int received(pump *p, exchange *x, const receive_chunk *r) {
    p->in_header_at = 0;
    p->body_at = -1;
    p->chunks_in++;
    p->taken_ms = p->heard_ms;
    x->checksums[x->received] = r->reduce ? 0 : p->in_header.checksum;
    x->received++;
    if (r->final && x->tell_final && p->python(FINAL, r->lo, r->hi, NULL)) return CALLBACK_FAILED;
    if (x->received < x->n_receives) return MOVED;
    p->to_receive = x->next_receive;
    return RECEIVED_ALL;
}

static int receive_some(pump *p) {
    exchange *x = p->to_receive;
    if (p->body_at < 0) {
        if (p->stopping && p->in_header_at == 0) return WAITS;
        ssize_t got = read_some(p, (uint8_t *)&p->in_header + p->in_header_at, HEADER_BYTES - p->in_header_at);
        if (got <= 0) return got < 0 && errno == EAGAIN ? WAITS : IN_FAILED;
        p->in_header_at += got;
        if (p->in_header_at < HEADER_BYTES) return MOVED;
        const header *h = &p->in_header;
        if (h->number == HEARTBEAT) {
            p->in_header_at = 0;
            return MOVED;
        }
        if (!x) return HEADER;
        const receive_chunk *r = &x->receives[x->received];
        if (h->quorum != p->quorum || h->seq != x->seq || h->exchange != x->number || h->number != (uint32_t)x->received ||
            (int64_t)h->length != r->hi - r->lo)
            return HEADER;
        p->body_at = 0;
        if (p->tell_chunks && p->python(CHUNK, x->number, 0, NULL)) return CALLBACK_FAILED;
    }
    const receive_chunk *r = &x->receives[x->received];
    int64_t length = r->hi - r->lo;
    if (p->in_slots) {
        int what = take(p, x, r, p->in_slots + p->chunks_in % (uint64_t)p->slots * p->slot_bytes);
        return what == MOVED ? received(p, x, r) : what;
    }
    int by_pieces = r->reduce && x->kind != BY_PYTHON && !p->in_header.checksum && !p->out_slots;
    int64_t base = by_pieces ? p->body_at / itemsize(x->kind) * itemsize(x->kind) : 0; /* what is added up already */
    uint8_t *target = by_pieces ? p->stage + (p->body_at - base) : r->reduce || p->out_slots ? p->stage + p->body_at
                                                                                             : x->output + r->lo + p->body_at;
    int64_t want = length - p->body_at;
    if (want > PIECE) want = PIECE;
    ssize_t got = want ? read_some(p, target, want) : 0;
    if (want && got <= 0) return got < 0 && errno == EAGAIN ? WAITS : IN_FAILED;
    p->body_at += got;
    if (by_pieces) {
        int64_t rest = (p->body_at - base) % itemsize(x->kind), whole = p->body_at - base - rest;
        add(x, x->output + r->lo + base, p->stage, r->lo + base, whole);
        memmove(p->stage, p->stage + whole, (size_t)rest);
    }
    if (p->body_at < length) return MOVED;
    if (p->in_header.checksum && p->hash(r->reduce || p->out_slots ? p->stage : x->output + r->lo, (size_t)length) != p->in_header.checksum)
        return BAD_CHECKSUM;
    if (!by_pieces && (r->reduce || p->out_slots)) {
        int what = take(p, x, r, p->stage);
        if (what != MOVED) return what;
    }
    return received(p, x, r);
}

/* --- both --------------------------------------------------------------------------------------------------------- */

/* Until there is something for Python to know. */
int32_t pump_run(pump *p) {
    int64_t until = -1, busy = 0;
    for (;;) {
        int hungry = 0, blocked = 0, what = WAITS, moved = 0;
        if (__atomic_load_n(&p->attention, __ATOMIC_ACQUIRE)) return WOKEN;
        if (p->in >= 0) {
            if ((what = grant(p)) >= 0) return what;
            if ((what = receive_some(p)) >= 0) return what;
            moved = what == MOVED;
        }
        if (p->out >= 0) {
            if ((what = send_some(p, &hungry, &blocked)) >= 0) return what;
            moved |= what == MOVED;
        }
        if (p->stopping && (p->in < 0 || (p->body_at < 0 && p->in_header_at == 0)) && (p->out < 0 || p->out_header_at < 0))
            return STOPPED;
        if (moved && ++busy % 256) continue;
        int64_t now = now_ms();
        if (until < 0) until = now + p->patience_ms;
        if (now >= until) return TICK; /* even if something moves: heartbeats without end are no progress */
        if (moved) continue;
        struct pollfd fds[3] = {
            {p->in, (short)(POLLIN | POLLRDHUP | (p->owed ? POLLOUT : 0)), 0},
            {p->out, (short)(POLLRDHUP | (hungry ? POLLIN : 0) | (blocked ? POLLOUT : 0)), 0},
            {p->wake, POLLIN, 0},
        };
        if (poll(fds, 3, (int)(until - now)) < 0 && errno != EINTR) {
            p->error = errno;
            return IN_FAILED;
        }
        if (fds[2].revents) return WOKEN;
        if (fds[1].revents & (POLLRDHUP | POLLHUP | POLLERR) && (what = take_credits(p)) >= 0) return what;
        if (fds[0].revents & (POLLHUP | POLLERR) && p->stopping && p->body_at < 0 && p->in_header_at == 0) return STOPPED;
    }
}
