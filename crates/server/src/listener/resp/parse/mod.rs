//! Parses commands into arguments without copying: an argument is a byte range of the input.

mod inline;

use std::fmt;

use super::{
    bounds::{MAX_ARGUMENTS, MAX_BULK_BYTES, MAX_COMMAND_BYTES, MAX_INLINE_BYTES, MAX_TOGETHER},
    reply::{Reply, RespVersion},
};

/// A protocol error. The rest of the input cannot be parsed, so the connection is closed.
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

/// Formats the error. If Redis has the same error, the wording is that of Redis.
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

/// The byte range of an argument.
#[derive(Clone, Copy, Debug)]
pub(super) struct ByteRange {
    pub(super) start: usize,
    pub(super) end: usize,
}

/// A parser that reads a few commands at a time and reuses its memory.
#[derive(Debug, Default)]
pub(super) struct Parser {
    parsed: Vec<ParsedCommand>,
    ranges: Vec<ByteRange>,
    /// The unquoted arguments of an inline command.
    unquoted: Vec<u8>,
    /// Whether the ranges refer to `unquoted` instead of the input.
    is_inline: bool,
}

/// The end of a parsed command in the input, and the end of its argument ranges in `ranges`.
#[derive(Clone, Copy, Debug)]
struct ParsedCommand {
    end: usize,
    ranges_end: usize,
}

impl Parser {
    /// Parses up to [`MAX_TOGETHER`] commands at the start of `input`, and returns their number.
    /// The number is 0 if the first command is incomplete. An empty line or an empty array counts
    /// as a command without arguments.
    ///
    /// # Errors
    ///
    /// Fails if the first command is malformed. If a later command is malformed, parsing stops
    /// before that command without an error.
    pub(super) fn parse(&mut self, input: &[u8]) -> Result<usize, ProtocolError> {
        self.parse_some(input, MAX_TOGETHER)
    }

    /// Parses one command at the start of `input`, like [`Self::parse`].
    pub(super) fn parse_one(&mut self, input: &[u8]) -> Result<usize, ProtocolError> {
        self.parse_some(input, 1)
    }

    fn parse_some(&mut self, input: &[u8], most: usize) -> Result<usize, ProtocolError> {
        self.parsed.clear();
        self.ranges.clear();
        self.is_inline = false;
        let mut start = 0;
        while self.parsed.len() < most && !self.is_inline {
            let is_first = self.parsed.is_empty();
            let end = match input.get(start) {
                None => break,
                Some(b'*') => self.array(input, start),
                // The arguments of an inline command are in `unquoted`, so an inline command is not
                // batched with other commands.
                Some(_) if is_first => self.line(input),
                Some(_) => break,
            };
            match end {
                Ok(Some(end)) => {
                    let ranges_end = self.ranges.len();
                    self.parsed.push(ParsedCommand { end, ranges_end });
                    start = end;
                }
                Err(error) if is_first => return Err(error),
                Ok(None) | Err(_) => break,
            }
        }
        Ok(self.parsed.len())
    }

    /// Returns the arguments of the parsed command with this index, and the position of its end in
    /// `input`.
    pub(super) fn command<'a>(
        &'a self,
        index: usize,
        input: &'a [u8],
    ) -> Option<(Arguments<'a>, usize)> {
        let ParsedCommand { end, ranges_end } = *self.parsed.get(index)?;
        let before = index
            .checked_sub(1)
            .and_then(|before| self.parsed.get(before));
        let first = before.map_or(0, |before| before.ranges_end);
        let arguments = Arguments {
            bytes: if self.is_inline {
                &self.unquoted
            } else {
                input
            },
            ranges: self.ranges.get(first..ranges_end)?,
        };
        Some((arguments, end))
    }

    /// Parses the array whose `*` is at `start`. Returns the end of the array, or `None` if the
    /// array is incomplete.
    fn array(&mut self, input: &[u8], start: usize) -> Result<Option<usize>, ProtocolError> {
        let (count, mut at) = match Header::at(input, start + 1) {
            Header::Partial => return Ok(None),
            Header::Malformed => return Err(ProtocolError::ArrayLength),
            Header::Negative { end } => return Ok(Some(end)),
            Header::Length { value, end } => (value, end),
        };
        if count > MAX_ARGUMENTS {
            return Err(ProtocolError::TooManyArguments);
        }
        let end_at_most = start + MAX_COMMAND_BYTES;
        for _ in 0..count {
            let Some(range) = bulk(input, at, end_at_most)? else {
                return Ok(None);
            };
            self.ranges.push(range);
            at = range.end + 2;
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
        self.is_inline = true;
        inline::split(
            line.strip_suffix(b"\r").unwrap_or(line),
            &mut self.unquoted,
            &mut self.ranges,
        )?;
        if self.ranges.len() > MAX_ARGUMENTS {
            return Err(ProtocolError::TooManyArguments);
        }
        Ok(Some(end + 1))
    }
}

/// Parses the bulk string whose `$` is at `at`. The command that contains the bulk string must not
/// end after `end_at_most`. Returns `None` if the bulk string is incomplete.
fn bulk(input: &[u8], at: usize, end_at_most: usize) -> Result<Option<ByteRange>, ProtocolError> {
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
    // An argument that is too long is rejected as soon as its length has been read, before its
    // bytes arrive.
    if length > MAX_BULK_BYTES {
        return Err(ProtocolError::BulkTooLong);
    }
    let end = start + length;
    if end + 2 > end_at_most {
        return Err(ProtocolError::CommandTooLong);
    }
    match input.get(end..end + 2) {
        None => Ok(None),
        Some(b"\r\n") => Ok(Some(ByteRange { start, end })),
        Some(_) => Err(ProtocolError::NoLineEnd),
    }
}

/// The result of parsing a header line, which contains a length.
enum Header {
    Partial,
    Malformed,
    Negative { end: usize },
    Length { value: usize, end: usize },
}

impl Header {
    /// The maximum number of digits. A number with more digits exceeds every bound.
    const MAX_DIGITS: usize = 12;

    fn at(input: &[u8], at: usize) -> Self {
        // Most lengths have one digit.
        if let Some(&[digit @ b'0'..=b'9', b'\r', b'\n']) = input.get(at..at + 3) {
            return Self::Length {
                value: usize::from(digit - b'0'),
                end: at + 3,
            };
        }
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
    ranges: &'a [ByteRange],
}

impl<'a> Arguments<'a> {
    pub(super) fn len(self) -> usize {
        self.ranges.len()
    }

    pub(super) fn get(self, index: usize) -> Option<&'a [u8]> {
        self.ranges
            .get(index)
            .and_then(|range| self.bytes.get(range.start..range.end))
    }

    pub(super) fn iter(self) -> impl Iterator<Item = &'a [u8]> {
        (0..self.len()).filter_map(move |index| self.get(index))
    }

    /// Appends the command in the wire format. Returns false if `out` would become longer than
    /// `most`.
    pub(super) fn write(self, out: &mut Vec<u8>, most: usize) -> bool {
        let length: usize = self.iter().map(|argument| argument.len() + 16).sum();
        if out.len() + length > most {
            return false;
        }
        let mut reply = Reply {
            out,
            protocol: RespVersion::default(),
        };
        reply.array(self.len());
        self.iter().for_each(|argument| reply.bulk(argument));
        true
    }

    /// Returns all arguments but the first `count`.
    pub(super) fn skip(self, count: usize) -> Self {
        Self {
            ranges: self.ranges.get(count..).unwrap_or_default(),
            ..self
        }
    }

    /// Returns whether argument `index` equals `word`, ignoring case.
    pub(super) fn is(self, index: usize, word: &str) -> bool {
        self.get(index)
            .is_some_and(|argument| argument.eq_ignore_ascii_case(word.as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the arguments of every command in `input`, parsing at most `most` at a time.
    fn words(mut input: &[u8], most: usize) -> (Vec<Vec<Vec<u8>>>, Option<ProtocolError>) {
        let (mut parser, mut all) = (Parser::default(), Vec::new());
        loop {
            match parser.parse_some(input, most) {
                Ok(0) => return (all, None),
                Ok(count) => {
                    let mut read = 0;
                    for index in 0..count {
                        let (arguments, end) = parser.command(index, input).unwrap();
                        all.push(arguments.iter().map(<[u8]>::to_vec).collect());
                        read = end;
                    }
                    assert!(parser.command(count, input).is_none());
                    input = &input[read..];
                }
                Err(error) => return (all, Some(error)),
            }
        }
    }

    #[test]
    fn commands_are_parsed_alike_however_many_are_read_together() {
        let beginning =
            b"*1\r\n$4\r\nPING\r\n*2\r\n$4\r\nECHO\r\n$0\r\n\r\n*0\r\n*-1\r\n\r\nPING 'a b'\n\
            ECHO c\r\n*1\r\n$1\r\nd\r\n";
        for (end, error) in [
            (&b""[..], None),
            (b"*2\r\n$1\r\na\r\n$", None),
            (b"*1\r\n:1\r\n", Some(ProtocolError::NotABulk(b':'))),
            (b"PING '\r\n", Some(ProtocolError::UnbalancedQuotes)),
        ] {
            let input = [beginning, end].concat();
            let alone = words(&input, 1);
            assert_eq!((alone.0.len(), alone.1), (8, error));
            for most in 2..12 {
                assert_eq!(words(&input, most), alone, "{most} together");
            }
        }
    }

    #[test]
    fn the_size_limit_applies_to_each_command() {
        let bulk = format!("$60000\r\n{}\r\n", "x".repeat(60_000));
        let long = format!("*13\r\n{}", bulk.repeat(13));
        assert!(long.len() < MAX_COMMAND_BYTES && 2 * long.len() > MAX_COMMAND_BYTES);
        assert_eq!(Parser::default().parse(long.repeat(3).as_bytes()), Ok(3));
        let too_long = format!("*14\r\n{}", bulk.repeat(14));
        let input = [long, too_long].concat();
        let mut parser = Parser::default();
        assert_eq!(parser.parse(input.as_bytes()), Ok(1));
        let end = parser.command(0, input.as_bytes()).unwrap().1;
        let refused = parser.parse(&input.as_bytes()[end..]);
        assert_eq!(refused, Err(ProtocolError::CommandTooLong));
    }
}
