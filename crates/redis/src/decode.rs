//! Decodes values into states, and decodes script replies. The decoders check every length that
//! they read.

use tidegate_core::{
    Timestamp,
    remote_eval::{ExactMicros, RemoteState, Terms},
};

use crate::{
    call::Reply,
    error::StoreError,
    value_format::{
        BLOCKED, CLAMPED, CONVERTED, FORM_BITS, HAS_LEDGER, KERNEL_BITS, RATE_COUNT_BITS,
        RATE_PERIODS, SEVERAL, SUMS, bytes_below, kernel, unit_of,
    },
};

/// The decoded value of a key.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct StoredValue {
    /// The end of the manual block; 0 for a block without an end, and `None` if the key is not
    /// blocked.
    pub(crate) block: Option<u64>,
    /// The encoded refund ledger; empty if there is none.
    pub(crate) ledger: Vec<u8>,
    /// The value without the block and the ledger.
    pub(crate) encoded_states: Vec<u8>,
    /// The states, each with the limit parameters under which it was stored; `None` if no units are
    /// charged to the key.
    pub(crate) states: Option<Vec<StoredState>>,
    /// The lead of each state, in the encoding of `lead.rs`; 0 for a state without a lead. A lead
    /// is an upper bound on how far the state was ahead of the clock when the state was written.
    pub(crate) leads: Vec<u8>,
}

impl StoredValue {
    /// Returns the end of the block that is active at `now`: `Some(None)` for a block without an
    /// end, `None` without a block.
    pub(crate) fn active_block(&self, now: Timestamp) -> Option<Option<Timestamp>> {
        match self.block? {
            0 => Some(None),
            until if until > now.as_micros() => Some(Some(Timestamp::from_micros(until))),
            _ => None,
        }
    }

    /// Returns the instant until which the refund ledger is kept.
    pub(crate) fn ledger_until(&self) -> Timestamp {
        kept_until(&self.ledger)
    }

    /// Returns the instant at which the refund ledger begins, in microseconds; 0 without a ledger.
    pub(crate) fn ledger_start(&self) -> u64 {
        let mut start = UnreadBytes(self.ledger.get(8..).unwrap_or_default());
        start.u56().unwrap_or(0)
    }

    /// Returns whether the refund ledger was created when the states were converted to other
    /// parameters.
    pub(crate) fn is_converted(&self) -> bool {
        self.ledger
            .first()
            .is_some_and(|sums| sums & CONVERTED != 0)
    }

    /// Returns the states without their parameters.
    pub(crate) fn remote_states(&self) -> Option<Vec<RemoteState>> {
        let states = self.states.as_ref()?;
        Some(states.iter().map(|(_, state)| state.clone()).collect())
    }
}

/// Returns the instant until which an encoded refund ledger is kept; the Unix epoch if the ledger
/// is empty.
pub(crate) fn kept_until(ledger: &[u8]) -> Timestamp {
    let mut until = UnreadBytes(ledger.get(1..).unwrap_or_default());
    until
        .u56()
        .map_or_else(|_| Timestamp::default(), Timestamp::from_micros)
}

/// Decodes the value under `key`.
pub(crate) fn stored_value(key: &[u8], bytes: &[u8]) -> Result<StoredValue, StoreError> {
    parse_value(bytes).map_err(|problem| StoreError::Foreign {
        key: key.escape_ascii().to_string(),
        problem: problem.to_owned(),
    })
}

/// Decodes a value; the error describes the defect.
fn parse_value(bytes: &[u8]) -> Result<StoredValue, &'static str> {
    let mut stored = StoredValue::default();
    let Some((first, rest)) = bytes.split_first() else {
        return Ok(stored);
    };
    let mut input = UnreadBytes(rest);
    if first & BLOCKED != 0 {
        stored.block = Some(input.u56()?);
    }
    if first & HAS_LEDGER != 0 {
        let sums = input.0.first().ok_or("it is too short")?;
        let length = 15 + 7 * usize::from(*sums & !(CLAMPED | CONVERTED));
        let (ledger, rest) = input
            .0
            .split_at_checked(length)
            .ok_or("its ledger is too short")?;
        stored.ledger = ledger.to_vec();
        input = UnreadBytes(rest);
    }
    if !input.0.is_empty() {
        stored.encoded_states = [&[first & !(BLOCKED | HAS_LEDGER)], input.0].concat();
        let states = UnreadBytes(&stored.encoded_states).states()?;
        let (states, leads) = states.into_iter().unzip();
        (stored.states, stored.leads) = (Some(states), leads);
    }
    Ok(stored)
}

/// The length of an entry of a stored sliding window log: an instant and a sum.
const ENTRY_BYTES: usize = 7 + 3;

/// The maximum cost of one stamp (an entry of a decoded sliding window log).
const MOST: u64 = 2_047;

fn non_empty(counts: Vec<u64>) -> Result<Vec<u64>, &'static str> {
    if counts.is_empty() {
        return Err("it has no buckets");
    }
    Ok(counts)
}

/// A state and the limit parameters under which it was stored.
pub(crate) type StoredState = (Terms, RemoteState);

/// The unread bytes of a value.
struct UnreadBytes<'b>(&'b [u8]);

impl UnreadBytes<'_> {
    fn number(&mut self, bytes: usize) -> Result<u64, &'static str> {
        let (number, rest) = self.0.split_at_checked(bytes).ok_or("it is too short")?;
        self.0 = rest;
        Ok(number
            .iter()
            .fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// Reads the states from a value without a block or a ledger. Each returned state has its
    /// parameters and its lead.
    fn states(mut self) -> Result<Vec<(StoredState, u8)>, &'static str> {
        let mut kinds = Vec::new();
        if self.0.first() == Some(&SEVERAL) {
            self.number(1)?;
            for _ in 0..self.number(1)? {
                kinds.push(self.terms()?);
            }
        } else {
            kinds.push(self.terms()?);
        }
        let mut states = Vec::with_capacity(kinds.len());
        for (kernel, terms) in kinds {
            let fraction_bytes = match terms {
                Terms::Gcra { denominator, .. } => bytes_below(denominator),
                _ => 0,
            };
            let state = self.state(kernel, usize::from(fraction_bytes))?;
            let lead = match state {
                RemoteState::Gcra(_) | RemoteState::Interval { .. } => self.number(1)?,
                _ => 0,
            };
            states.push(((terms, state), u8::try_from(lead).unwrap_or(u8::MAX)));
        }
        if self.0.is_empty() {
            Ok(states)
        } else {
            Err("it is too long")
        }
    }

    /// Reads an algorithm and the parameters of its state.
    fn terms(&mut self) -> Result<(u8, Terms), &'static str> {
        let kind = self.number(1)?;
        // After the mask, the number fits into a byte, so the conversion cannot fail.
        let bits =
            |shift: u32, count: u32| u8::try_from(kind >> shift & ((1 << count) - 1)).unwrap_or(0);
        let (kernel, form) = (bits(0, KERNEL_BITS), bits(KERNEL_BITS, FORM_BITS));
        if kind >> (KERNEL_BITS + FORM_BITS) != 0 {
            return Err("its kind of value is unknown");
        }
        let terms = match (kernel, form) {
            (kernel::GCRA, 0) => Terms::Gcra {
                numerator: self.scaled(3)?,
                denominator: 1,
            },
            (kernel::GCRA, 1) => {
                let number = self.number(2)?;
                let count = number & ((1 << RATE_COUNT_BITS) - 1);
                // The two remaining bits index the four periods.
                let period = usize::try_from(number >> RATE_COUNT_BITS).unwrap_or(0);
                unit_of(count, RATE_PERIODS[period])
            }
            (kernel::GCRA, 2) => {
                let (numerator, denominator) = (self.u56()?, self.u56()?);
                self.number(1)?;
                Terms::Gcra {
                    numerator,
                    denominator,
                }
            }
            (kernel::INTERVAL, 0) => Terms::Interval {
                refill: self.scaled(4)?,
                every: self.scaled(4)?,
            },
            (kernel::INTERVAL, 2) => Terms::Interval {
                refill: self.u56()?,
                every: self.u56()?,
            },
            (kernel::WINDOW, 1) => Terms::FirstRequest {
                window: self.scaled(4)?,
            },
            (kernel::WINDOW, 2) => Terms::FirstRequest {
                window: self.u56()?,
            },
            (kernel::WINDOW..=kernel::LEASE, 0) => {
                Terms::Digest(u32::try_from(self.number(4)?).unwrap_or(0))
            }
            _ => return Err("its kind of value is unknown"),
        };
        match terms {
            Terms::Gcra { numerator: 0, .. }
            | Terms::Gcra { denominator: 0, .. }
            | Terms::Interval { refill: 0, .. }
            | Terms::Interval { every: 0, .. }
            | Terms::FirstRequest { window: 0 } => Err("its numbers are zero"),
            terms => Ok((kernel, terms)),
        }
    }

    /// Reads a number that is stored as a mantissa and, in the lowest four bits, a decimal
    /// exponent.
    fn scaled(&mut self, bytes: usize) -> Result<u64, &'static str> {
        let number = self.number(bytes)?;
        // The product is at most 2^28 times 10^15, which may overflow.
        (number >> 4)
            .checked_mul(10_u64.pow(u32::try_from(number & 15).unwrap_or(0)))
            .ok_or("its numbers are too large")
    }

    fn state(&mut self, number: u8, fraction_bytes: usize) -> Result<RemoteState, &'static str> {
        match number {
            kernel::GCRA if fraction_bytes <= 7 => Ok(RemoteState::Gcra(ExactMicros {
                whole: self.number(7)?,
                part: self.number(fraction_bytes)?,
            })),
            kernel::INTERVAL => Ok(RemoteState::Interval {
                full_at: self.u56()?,
                last: self.u56()?,
            }),
            kernel::WINDOW => Ok(RemoteState::Window {
                count: self.u56()?,
                end: self.u56()?,
            }),
            kernel::WEIGHTED => Ok(RemoteState::Weighted {
                index: self.u56()?,
                previous: self.u56()?,
                current: self.u56()?,
                window: self.u56()?,
            }),
            kernel::BUCKETS => self.buckets(),
            kernel::LOG => {
                let (longest, stamps) = self.log()?;
                Ok(RemoteState::Log { longest, stamps })
            }
            kernel::LEASE => {
                let (longest, stamps) = self.log()?;
                Ok(RemoteState::Lease { longest, stamps })
            }
            _ => Err("its kind of state is unknown"),
        }
    }

    fn buckets(&mut self) -> Result<RemoteState, &'static str> {
        let (newest, width, _) = (self.u56()?, self.u56()?, self.u56()?);
        let counts: Result<Vec<u64>, _> = (0..self.number(2)?).map(|_| self.u56()).collect();
        Ok(RemoteState::Buckets {
            newest,
            width,
            counts: counts.and_then(non_empty)?,
        })
    }

    /// Reads a sliding window log. Returns the length of the longest window and the entries.
    fn log(&mut self) -> Result<(u64, Stamps), &'static str> {
        let (longest, entries) = (self.u56()?, self.number(4)?);
        let (windows, mut sum) = (self.number(1)?, self.number(3)?);
        for _ in 0..windows {
            self.number(7)?;
            self.number(7)?;
        }
        // Redis may hold an invalid value, so the memory is bounded by the bytes that it has.
        let most = self.0.len() / ENTRY_BYTES;
        let mut stamps = Vec::with_capacity(usize::try_from(entries).unwrap_or(most).min(most));
        for _ in 0..entries {
            let (at, before) = (self.u56()?, sum);
            sum = self.number(3)?;
            let mut cost = sum.wrapping_sub(before) & SUMS;
            // `single_key_log.lua` merges entries, so one entry can cost more than `MOST`. Split
            // such an entry into several stamps.
            while cost > MOST {
                stamps.push((at, MOST));
                cost -= MOST;
            }
            stamps.push((at, cost));
        }
        Ok((longest, stamps))
    }

    /// Reads an instant or a count.
    fn u56(&mut self) -> Result<u64, &'static str> {
        self.number(7)
    }
}

/// A reply of the script `check`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CheckReply {
    /// The script made a decision. Contains the values on which the decision is based and, for a
    /// reservation, the receipts.
    Decided {
        admitted: bool,
        now: Timestamp,
        values: Vec<Vec<u8>>,
        receipts: Vec<Vec<u8>>,
    },
    /// The key of one charge is blocked.
    Blocked {
        now: Timestamp,
        charge: usize,
        until: Option<Timestamp>,
    },
    /// A value was stored under other limit parameters, or by a clock that was ahead; nothing was
    /// decided.
    Outdated {
        now: Timestamp,
        values: Vec<Vec<u8>>,
    },
    /// The server's time is outside the calendar windows in the call's program (the encoded
    /// limits); nothing was decided.
    OutsideCalendar { now: Timestamp },
    /// The slot of the keys is migrating and some keys are already on another node; nothing was
    /// decided.
    SplitHashSlot,
}

impl CheckReply {
    /// Returns the server's time, if the script ran.
    pub(crate) fn now(&self) -> Option<Timestamp> {
        match self {
            Self::SplitHashSlot => None,
            Self::Decided { now, .. }
            | Self::Blocked { now, .. }
            | Self::Outdated { now, .. }
            | Self::OutsideCalendar { now } => Some(*now),
        }
    }
}

/// Decodes the reply of the script `check` to a call with `charges` charges.
pub(crate) fn check_reply(reply: Reply, charges: usize) -> Option<CheckReply> {
    let Reply::Array(parts) = reply else {
        return None;
    };
    let mut parts = parts.into_iter();
    let outcome = integer(&parts.next()?)?;
    let now = Timestamp::from_micros(integer(&parts.next()?)?);
    if outcome == 3 {
        let charge = usize::try_from(integer(&parts.next()?)?).ok()?;
        let until = integer(&parts.next()?)?;
        let until = (until > 0).then(|| Timestamp::from_micros(until));
        return (charge < charges).then_some(CheckReply::Blocked { now, charge, until });
    }
    if outcome == 4 {
        return Some(CheckReply::OutsideCalendar { now });
    }
    let mut values: Vec<Vec<u8>> = parts.map(bytes).collect::<Option<_>>()?;
    let receipts = values.split_off(charges.min(values.len()));
    let is_whole = |list: &Vec<Vec<u8>>| list.len() == charges;
    if !is_whole(&values) || !(receipts.is_empty() || is_whole(&receipts)) {
        return None;
    }
    match outcome {
        0 | 1 => Some(CheckReply::Decided {
            admitted: outcome == 1,
            now,
            values,
            receipts,
        }),
        2 => Some(CheckReply::Outdated { now, values }),
        _ => None,
    }
}

/// Entries of a sliding window log, each with its instant and its cost.
type Stamps = Vec<(u64, u64)>;

/// A reply of a fast-path script. A fast-path script evaluates the limits of a single key.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FastPathReply {
    /// The script made a decision. The field is the time in microseconds by which the theoretical
    /// arrival time in the GCRA state was ahead of the clock before the decision.
    AheadBy(u64),
    /// The script made a decision at `now`. `value` is the stored value before the decision.
    Decided { now: Timestamp, value: Vec<u8> },
    /// The script made no decision, because it does not support the value's header.
    UnknownHeader { now: Timestamp, value: Vec<u8> },
}

/// Decodes the reply of a fast-path script.
pub(crate) fn fast_path_reply(reply: Reply) -> Option<FastPathReply> {
    match reply {
        Reply::Int(_) => integer(&reply).map(FastPathReply::AheadBy),
        Reply::BulkString(mut now) => {
            let value = now.split_off(now.len().min(7));
            let now = Timestamp::from_micros(UnreadBytes(&now).u56().ok()?);
            Some(FastPathReply::Decided { now, value })
        }
        Reply::Array(parts) => {
            let [value, now] = <[Reply; 2]>::try_from(parts).ok()?;
            let (now, value) = (Timestamp::from_micros(integer(&now)?), bytes(value)?);
            Some(FastPathReply::UnknownHeader { now, value })
        }
        _ => None,
    }
}

/// Decodes the reply of the script `read` to a call with `keys` keys.
pub(crate) fn values(reply: Reply, keys: usize) -> Option<(Timestamp, Vec<Vec<u8>>)> {
    let Reply::Array(parts) = reply else {
        return None;
    };
    let mut parts = parts.into_iter();
    let now = Timestamp::from_micros(integer(&parts.next()?)?);
    let values: Vec<Vec<u8>> = parts.map(bytes).collect::<Option<_>>()?;
    (values.len() == keys).then_some((now, values))
}

/// The result of renewing the leases of one charge.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ChargeRenewal {
    /// Whether the leases are held after the renewal.
    pub(crate) is_held: bool,
    /// The new receipt of the charge.
    pub(crate) receipt: Vec<u8>,
}

/// Decodes the reply of the script `renew` to a call with `charges` charges.
pub(crate) fn renewals(reply: Reply, charges: usize) -> Option<Vec<ChargeRenewal>> {
    let Reply::Array(replies) = reply else {
        return None;
    };
    let renewal = |reply: Reply| {
        let Reply::Array(parts) = reply else {
            return None;
        };
        let [held, receipt] = <[Reply; 2]>::try_from(parts).ok()?;
        Some(ChargeRenewal {
            is_held: integer(&held)? == 1,
            receipt: bytes(receipt)?,
        })
    };
    let renewals: Vec<_> = replies.into_iter().map(renewal).collect::<Option<_>>()?;
    (renewals.len() == charges).then_some(renewals)
}

/// A page from a scan of the block index.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ScanPage {
    /// The cursor of the next page.
    pub(crate) next: Vec<u8>,
    /// The keys and values on the page.
    pub(crate) entries: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Decodes a page of a scan.
pub(crate) fn scan_page(reply: Reply) -> Option<ScanPage> {
    let Reply::Array(parts) = reply else {
        return None;
    };
    let [next, Reply::Array(entries)] = <[Reply; 2]>::try_from(parts).ok()? else {
        return None;
    };
    let mut items = entries.into_iter().map(bytes);
    let mut entries = Vec::new();
    while let Some(key) = items.next() {
        entries.push((key?, items.next()??));
    }
    Some(ScanPage {
        next: bytes(next)?,
        entries,
    })
}

/// Decodes a list of keys.
pub(crate) fn keys(reply: Reply) -> Option<Vec<Vec<u8>>> {
    match reply {
        Reply::Array(keys) => keys.into_iter().map(bytes).collect(),
        _ => None,
    }
}

/// Returns the integer in `reply`; `None` if it is negative or not an integer.
pub(crate) fn integer(reply: &Reply) -> Option<u64> {
    match reply {
        Reply::Int(integer) => u64::try_from(*integer).ok(),
        _ => None,
    }
}

pub(crate) fn bytes(reply: Reply) -> Option<Vec<u8>> {
    match reply {
        Reply::BulkString(bytes) => Some(bytes),
        _ => None,
    }
}
