//! The binary encoding of a denial.
//!
//! ```text
//! | time, 8 bytes | wait, 8 | listener, 1 | mode, 1 | reason, 1
//! | rule | policy | number of key values, 1 | values | number of entries, 1 | names and values |
//! ```
//!
//! Each string is preceded by its length in 2 bytes. A length of 0 means that the denial has no
//! rule or no policy.

use tidegate_core::{Mode, RetryAfter, Span, Timestamp};

use super::{DenialReason, DenialRecord, ring::MAX_RECORD_BYTES};
use crate::metrics::ListenerKind;

/// The maximum length of an entry's value in bytes. A longer value is truncated and ends in `…`.
const MAX_VALUE_BYTES: usize = 256;

/// The encoded wait time of a request that is never admitted.
const NEVER: u64 = u64::MAX;

/// A denial to be recorded.
#[derive(Clone, Copy)]
pub(super) struct NewDenial<'a> {
    pub(super) at: Timestamp,
    pub(super) listener: ListenerKind,
    pub(super) mode: Mode,
    pub(super) reason: DenialReason,
    pub(super) retry_after: RetryAfter,
    pub(super) rule: Option<&'a str>,
    pub(super) policy: Option<&'a str>,
    /// The values of the key, at most [`tidegate_core::bounds::MAX_KEY_BYTES`] in total.
    pub(super) key: &'a [&'a str],
    pub(super) entries: &'a [(&'a str, &'a str)],
}

impl NewDenial<'_> {
    /// Appends the encoded denial, in at most [`MAX_RECORD_BYTES`]. Entries that do not fit are
    /// left out.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        self.encode_within(MAX_RECORD_BYTES, out);
    }

    /// Appends the encoded denial, without the entries that would end after `max` bytes.
    pub(super) fn encode_within(&self, max: usize, out: &mut Vec<u8>) {
        let end = out.len() + max;
        out.extend_from_slice(&self.at.as_micros().to_le_bytes());
        let wait = self.retry_after.span().map_or(NEVER, Span::as_micros);
        out.extend_from_slice(&wait.to_le_bytes());
        let mode = u8::from(self.mode == Mode::Shadow);
        let reason = DenialReason::ALL
            .iter()
            .position(|reason| *reason == self.reason);
        let small = |number: usize| u8::try_from(number).unwrap_or(u8::MAX);
        let reason = small(reason.unwrap_or(0));
        out.extend_from_slice(&[small(self.listener.index()), mode, reason]);
        put(out, self.rule.unwrap_or_default());
        put(out, self.policy.unwrap_or_default());
        out.push(small(self.key.len()));
        self.key.iter().for_each(|value| put(out, value));
        let count = out.len();
        out.push(0);
        for (name, value) in self.entries {
            let start = out.len();
            put(out, name);
            put(out, cut(value, &mut String::new()));
            if out.len() > end {
                out.truncate(start);
                break;
            }
            out[count] += 1;
        }
    }
}

/// Truncates a value that is longer than [`MAX_VALUE_BYTES`].
fn cut<'v>(value: &'v str, buffer: &'v mut String) -> &'v str {
    if value.len() <= MAX_VALUE_BYTES {
        return value;
    }
    let mark = '…';
    let end = value.floor_char_boundary(MAX_VALUE_BYTES - mark.len_utf8());
    buffer.push_str(&value[..end]);
    buffer.push(mark);
    buffer
}

fn put(out: &mut Vec<u8>, text: &str) {
    let end = text.floor_char_boundary(usize::from(u16::MAX));
    let length = u16::try_from(end).unwrap_or(u16::MAX);
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(&text.as_bytes()[..end]);
}

/// A recorded denial. All fields except the request entries are already decoded.
pub(super) struct Record<'b> {
    pub(super) at: Timestamp,
    pub(super) rule: Option<&'b str>,
    pub(super) key: Vec<&'b str>,
    wait: u64,
    listener: ListenerKind,
    mode: Mode,
    reason: DenialReason,
    policy: Option<&'b str>,
    entries: RecordReader<'b>,
}

impl<'b> Record<'b> {
    /// Decodes `bytes` written by [`NewDenial::encode`].
    pub(super) fn decode(bytes: &'b [u8]) -> Option<Self> {
        let mut input = RecordReader(bytes);
        let at = Timestamp::from_micros(input.number()?);
        let wait = input.number()?;
        let listener = *ListenerKind::ALL.get(input.small()?)?;
        let mode = match input.small()? {
            0 => Mode::Enforce,
            _ => Mode::Shadow,
        };
        let reason = *DenialReason::ALL.get(input.small()?)?;
        let rule = Some(input.text()?).filter(|rule| !rule.is_empty());
        let policy = Some(input.text()?).filter(|policy| !policy.is_empty());
        let values = input.small()?;
        let key = (0..values).map(|_| input.text()).collect::<Option<_>>()?;
        Some(Self {
            at,
            rule,
            key,
            wait,
            listener,
            mode,
            reason,
            policy,
            entries: input,
        })
    }

    /// Copies the record into a [`DenialRecord`].
    pub(super) fn to_denial(&self) -> DenialRecord {
        let mut input = RecordReader(self.entries.0);
        let count = input.small().unwrap_or(0);
        let entry = |_| Some((input.text()?.to_owned(), input.text()?.to_owned()));
        DenialRecord {
            at: self.at,
            listener: self.listener,
            mode: self.mode,
            reason: self.reason,
            retry_after: match self.wait {
                NEVER => RetryAfter::Never,
                micros => RetryAfter::After(Span::from_micros(micros)),
            },
            rule: self.rule.map(str::to_owned),
            policy: self.policy.map(str::to_owned),
            key: self.key.iter().map(|value| (*value).to_owned()).collect(),
            entries: (0..count).map_while(entry).collect(),
        }
    }
}

struct RecordReader<'b>(&'b [u8]);

impl<'b> RecordReader<'b> {
    fn number(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*number))
    }

    fn small(&mut self) -> Option<usize> {
        let (number, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(usize::from(*number))
    }

    fn text(&mut self) -> Option<&'b str> {
        let (length, rest) = self.0.split_first_chunk()?;
        let (text, rest) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
        self.0 = rest;
        std::str::from_utf8(text).ok()
    }
}
