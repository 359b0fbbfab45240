//! The format of the values that Redis stores.
//!
//! A value is binary. Numbers are big-endian; an instant or a count takes 7 bytes.
//!
//! ```text
//!   | first: 1 byte | [block: 7] | [ledger] | parameters | state | state | …
//!
//!   first       1 bit   the key is blocked, and the end of the block follows (0: no end)
//!               1 bit   a refund ledger follows: the number of its sums and two flags (whether a
//!                       clamp, and whether a conversion of the states created the ledger), 1 byte;
//!                       the instant until which it is kept; its start; its sums, 7 bytes each
//!               1 bit   0
//!               2 bits  the form of the parameters
//!               3 bits  the algorithm. The number 7 stands for several members: their number
//!                       follows, 1 byte, and for each member a byte like this one, without the
//!                       flags, and its parameters
//!   parameters  the parameters under which the state is counted (`remote_eval::Terms`), so that
//!               a server with other parameters can convert the state
//! ```
//!
//! | algorithm | form | parameters |
//! | --- | --- | --- |
//! | GCRA | 0 | its unit in microseconds: 20 bits, and a power of ten in 4 bits |
//! | | 1 | its rate: a second, minute, hour or day in 2 bits, and units in that period in 14 |
//! | | 2 | the unit in parts, 7 bytes; parts per microsecond, 7; bytes of a part in a state, 1 |
//! | interval | 0 | tokens and microseconds, each 28 bits, and a power of ten in 4 bits |
//! | | 2 | both in 7 bytes |
//! | window | 0 | a digest, 4 bytes |
//! | | 1, 2 | windows from the first request: microseconds, as of an interval, or in 7 bytes |
//! | any other | 0 | a digest, 4 bytes; the state itself contains what a conversion needs |
//!
//! The last byte in the state of a GCRA limit or an interval bucket is the lead. The lead is an
//! upper bound on how far the state was ahead of the clock when the state was written (`lead.rs`).
//!
//! The value of a key with one GCRA limit at an ordinary rate takes 12 bytes. A string of 12 bytes
//! is the longest string that fits into the smallest string allocation of Redis. Every number has
//! exactly one encoding, so that parameters can be compared as bytes.

use tidegate_core::remote_eval::Terms;

/// The code that replaces the algorithm ID in the header of a value with several members.
pub(crate) const SEVERAL: u8 = 7;

/// Flag in the first byte of a value: the key is blocked.
pub(crate) const BLOCKED: u8 = 0x80;

/// Flag in the first byte of a value: the value contains a refund ledger.
pub(crate) const HAS_LEDGER: u8 = 0x40;

/// The number of bits for the algorithm ID, which are the lowest bits of a header byte. All eight
/// codes are in use: seven algorithms ([`kernel`]) and [`SEVERAL`]. Therefore an eighth algorithm
/// needs a new value format.
pub(crate) const KERNEL_BITS: u32 = 3;
/// The number of bits for the encoding form of the parameters, which are the next bits of a header
/// byte.
pub(crate) const FORM_BITS: u32 = 2;

/// The possible periods of a rate that is encoded as a count per period, in microseconds. The
/// encoding uses the first period in which the count is an integer of at most [`RATE_COUNT_BITS`]
/// bits.
pub(crate) const RATE_PERIODS: [u64; 4] = [1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000];
/// The number of bits for the count of a rate.
pub(crate) const RATE_COUNT_BITS: u32 = 14;

/// Flag in the first byte of a refund ledger: the ledger was created when the states were clamped.
/// The states were clamped because they had been written by a clock that was ahead.
pub(crate) const CLAMPED: u8 = 0x80;

/// Flag in the first byte of a refund ledger: the ledger was created when the states were converted
/// to other parameters.
pub(crate) const CONVERTED: u8 = 0x40;

/// The algorithm IDs in the scripts and in stored values. The IDs are equal to the IDs in the core
/// crate's snapshots. No code depends on equal IDs.
pub(crate) mod kernel {
    pub(crate) const GCRA: u8 = 0;
    pub(crate) const INTERVAL: u8 = 1;
    pub(crate) const WINDOW: u8 = 2;
    pub(crate) const LOG: u8 = 3;
    pub(crate) const BUCKETS: u8 = 4;
    pub(crate) const WEIGHTED: u8 = 5;
    pub(crate) const LEASE: u8 = 6;
}

/// Mask for the running sum of costs in a sliding window log. The sum is stored modulo 2^24.
pub(crate) const SUMS: u64 = (1 << 24) - 1;

/// Returns the unit of a rate of `count` per `period`. Neither `count` nor `period` may be zero.
pub(crate) fn unit_of(count: u64, period: u64) -> Terms {
    let (mut divisor, mut rest) = (period, count);
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    Terms::Gcra {
        numerator: period / divisor,
        denominator: count / divisor,
    }
}

/// Returns the number of bytes that can hold every number below `count`.
pub(crate) fn bytes_below(count: u64) -> u8 {
    // The result is at most 8, because a number has 64 bits.
    let bits = u64::BITS - (count.max(1) - 1).leading_zeros();
    u8::try_from(bits.div_ceil(8)).unwrap_or(8)
}
