//! Bytes into arguments, without copying them: an argument is a place in what was read.

use std::fmt;

use super::{
    bounds::{MAX_ARGUMENTS, MAX_BULK_BYTES, MAX_COMMAND_BYTES, MAX_INLINE_BYTES},
    inline,
    reply::{Protocol, Reply},
};

/// A client that does not speak the protocol. What follows cannot be understood, so the connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProtocolError {
    ArrayLength,
    TooManyArguments,
    BulkLength,
    BulkTooLong,
    CommandTooLong,
    NotABulk(u8),
    NoLineEnd,
    InlineTooLong,
    UnbalancedQuotes,
    ForAnotherProtocol,
}

/// Begins with Redis' own words where Redis has any.
impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ArrayLength => write!(f, "invalid multibulk length"),
            Self::TooManyArguments => {
                write!(
                    f,
                    "invalid multibulk length: at most {MAX_ARGUMENTS} arguments"
                )
            }
            Self::BulkLength => write!(f, "invalid bulk length"),
            Self::BulkTooLong => write!(f, "invalid bulk length: at most {MAX_BULK_BYTES} bytes"),
            Self::CommandTooLong => {
                write!(f, "too big command: at most {MAX_COMMAND_BYTES} bytes")
            }
            Self::NotABulk(byte) => write!(f, "expected '$', got '{}'", byte.escape_ascii()),
            Self::NoLineEnd => write!(f, "expected a line end after an argument"),
            Self::InlineTooLong => {
                write!(
                    f,
                    "too big inline request: at most {MAX_INLINE_BYTES} bytes"
                )
            }
            Self::UnbalancedQuotes => write!(f, "unbalanced quotes in request"),
            Self::ForAnotherProtocol => write!(f, "this is the Redis protocol, not HTTP"),
        }
    }
}

/// Where an argument is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) start: usize,
    pub(super) end: usize,
}

/// Takes one command after the other apart, into the same memory.
#[derive(Debug, Default)]
pub(super) struct Parser {
    places: Vec<Place>,
    /// The arguments of an inline command, without their quotes; places are in here then.
    unquoted: Option<Vec<u8>>,
}

impl Parser {
    /// Reads the command at the beginning of `input` and answers how long it is; `None` if it has not
    /// arrived whole. An empty line or array is a command without arguments.
    pub(super) fn parse(&mut self, input: &[u8]) -> Result<Option<usize>, ProtocolError> {
        self.places.clear();
        match input.first() {
            None => Ok(None),
            Some(b'*') => {
                self.unquoted = None;
                self.array(input)
            }
            Some(_) => self.line(input),
        }
    }

    /// The arguments that [`Self::parse`] found in `input`.
    pub(super) fn arguments<'a>(&'a self, input: &'a [u8]) -> Arguments<'a> {
        Arguments {
            bytes: self.unquoted.as_deref().unwrap_or(input),
            places: &self.places,
        }
    }

    fn array(&mut self, input: &[u8]) -> Result<Option<usize>, ProtocolError> {
        let (count, mut at) = match Header::at(input, 1) {
            Header::Partial => return Ok(None),
            Header::Malformed => return Err(ProtocolError::ArrayLength),
            Header::Negative { end } => return Ok(Some(end)),
            Header::Length { value, end } => (value, end),
        };
        if count > MAX_ARGUMENTS {
            return Err(ProtocolError::TooManyArguments);
        }
        for _ in 0..count {
            let Some(place) = bulk(input, at)? else {
                return Ok(None);
            };
            self.places.push(place);
            at = place.end + 2;
        }
        Ok(Some(at))
    }

    fn line(&mut self, input: &[u8]) -> Result<Option<usize>, ProtocolError> {
        let within = &input[..input.len().min(MAX_INLINE_BYTES + 2)];
        let Some(end) = within.iter().position(|byte| *byte == b'\n') else {
            let too_long = within.len() > MAX_INLINE_BYTES + 1;
            return if too_long {
                Err(ProtocolError::InlineTooLong)
            } else {
                Ok(None)
            };
        };
        let line = &input[..end];
        let unquoted = self.unquoted.get_or_insert_default();
        inline::split(
            line.strip_suffix(b"\r").unwrap_or(line),
            unquoted,
            &mut self.places,
        )?;
        if self.places.len() > MAX_ARGUMENTS {
            return Err(ProtocolError::TooManyArguments);
        }
        Ok(Some(end + 1))
    }
}

/// The bulk string whose `$` is at `at`; `None` if it has not arrived whole.
fn bulk(input: &[u8], at: usize) -> Result<Option<Place>, ProtocolError> {
    match input.get(at) {
        None => return Ok(None),
        Some(b'$') => {}
        Some(other) => return Err(ProtocolError::NotABulk(*other)),
    }
    let (length, start) = match Header::at(input, at + 1) {
        Header::Partial => return Ok(None),
        Header::Malformed | Header::Negative { .. } => return Err(ProtocolError::BulkLength),
        Header::Length { value, end } => (value, end),
    };
    // Refused as announced: a promise of bytes that will not fit is not waited for.
    if length > MAX_BULK_BYTES {
        return Err(ProtocolError::BulkTooLong);
    }
    let end = start + length;
    if end + 2 > MAX_COMMAND_BYTES {
        return Err(ProtocolError::CommandTooLong);
    }
    match input.get(end..end + 2) {
        None => Ok(None),
        Some(b"\r\n") => Ok(Some(Place { start, end })),
        Some(_) => Err(ProtocolError::NoLineEnd),
    }
}

/// A number and its line end.
enum Header {
    Partial,
    Malformed,
    Negative { end: usize },
    Length { value: usize, end: usize },
}

impl Header {
    /// The most digits, with a sign: anything longer is beyond every bound.
    const MAX_DIGITS: usize = 12;

    fn at(input: &[u8], at: usize) -> Self {
        let negative = input.get(at) == Some(&b'-');
        let first = at + usize::from(negative);
        let mut value = 0;
        for (digits, byte) in input[first..].iter().enumerate() {
            match byte {
                b'0'..=b'9' if digits < Self::MAX_DIGITS => {
                    value = value * 10 + usize::from(byte - b'0')
                }
                b'\r' if digits > 0 => {
                    let end = first + digits + 2;
                    return match input.get(end - 1) {
                        None => Self::Partial,
                        Some(b'\n') if negative => Self::Negative { end },
                        Some(b'\n') => Self::Length { value, end },
                        Some(_) => Self::Malformed,
                    };
                }
                _ => return Self::Malformed,
            }
        }
        Self::Partial
    }
}

/// The arguments of one command.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arguments<'a> {
    bytes: &'a [u8],
    places: &'a [Place],
}

impl<'a> Arguments<'a> {
    pub(super) fn len(self) -> usize {
        self.places.len()
    }

    pub(super) fn get(self, index: usize) -> Option<&'a [u8]> {
        self.places
            .get(index)
            .and_then(|place| self.bytes.get(place.start..place.end))
    }

    pub(super) fn iter(self) -> impl Iterator<Item = &'a [u8]> {
        (0..self.len()).filter_map(move |index| self.get(index))
    }

    /// Appends the command as it is on the wire; false if `out` would then be longer than `most`.
    pub(super) fn write(self, out: &mut Vec<u8>, most: usize) -> bool {
        let length: usize = self.iter().map(|argument| argument.len() + 16).sum();
        if out.len() + length > most {
            return false;
        }
        let mut reply = Reply {
            out,
            protocol: Protocol::default(),
        };
        reply.array(self.len());
        self.iter().for_each(|argument| reply.bulk(argument));
        true
    }

    /// All but the first `count`.
    pub(super) fn skip(self, count: usize) -> Self {
        Self {
            places: self.places.get(count..).unwrap_or_default(),
            ..self
        }
    }

    /// Whether argument `index` is `word`, in whatever case.
    pub(super) fn is(self, index: usize, word: &str) -> bool {
        self.get(index)
            .is_some_and(|argument| argument.eq_ignore_ascii_case(word.as_bytes()))
    }
}
