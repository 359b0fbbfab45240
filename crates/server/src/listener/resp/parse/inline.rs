//! Inline commands. An inline command is a line of words, as a user types it into telnet.
//!
//! Words are split and unquoted as in Redis: `"…"` can contain all escapes, and `'…'` can contain
//! only the escape `\'`.

use super::{ByteRange, ProtocolError};

/// Splits `line` into words. Writes the bytes of the words to `unquoted`, which is cleared first,
/// and the ranges of the words to `ranges`.
pub(super) fn split(
    line: &[u8],
    unquoted: &mut Vec<u8>,
    ranges: &mut Vec<ByteRange>,
) -> Result<(), ProtocolError> {
    unquoted.clear();
    let mut rest = line.trim_ascii_start();
    // HTTP requests are rejected. A web page can make a browser send an HTTP request to any port.
    // If the request were accepted, the lines of its body would run as commands.
    let is_http = |beginning: &[u8]| {
        rest.get(..beginning.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(beginning))
    };
    if is_http(b"POST ") || is_http(b"GET /") || is_http(b"Host:") {
        return Err(ProtocolError::ForAnotherProtocol);
    }
    while !rest.is_empty() {
        let start = unquoted.len();
        rest = word(rest, unquoted)?.trim_ascii_start();
        ranges.push(ByteRange {
            start,
            end: unquoted.len(),
        });
    }
    Ok(())
}

/// Moves one word from the start of `input` to `out` and returns the rest.
fn word<'a>(mut input: &'a [u8], out: &mut Vec<u8>) -> Result<&'a [u8], ProtocolError> {
    while let Some((byte, rest)) = input.split_first() {
        match byte {
            byte if byte.is_ascii_whitespace() => return Ok(input),
            b'"' => return closed(double_quoted(rest, out)?),
            b'\'' => return closed(single_quoted(rest, out)?),
            byte => out.push(*byte),
        }
        input = rest;
    }
    Ok(input)
}

/// Checks that a closing quote is followed by whitespace or the end of the line. Returns `rest`.
fn closed(rest: &[u8]) -> Result<&[u8], ProtocolError> {
    match rest.first() {
        Some(byte) if !byte.is_ascii_whitespace() => Err(ProtocolError::UnbalancedQuotes),
        _ => Ok(rest),
    }
}

fn single_quoted<'a>(mut input: &'a [u8], out: &mut Vec<u8>) -> Result<&'a [u8], ProtocolError> {
    loop {
        input = match input {
            [b'\\', b'\'', rest @ ..] => {
                out.push(b'\'');
                rest
            }
            [b'\'', rest @ ..] => return Ok(rest),
            [byte, rest @ ..] => {
                out.push(*byte);
                rest
            }
            [] => return Err(ProtocolError::UnbalancedQuotes),
        }
    }
}

fn double_quoted<'a>(mut input: &'a [u8], out: &mut Vec<u8>) -> Result<&'a [u8], ProtocolError> {
    loop {
        input = match input {
            [b'\\', b'x', high, low, rest @ ..]
                if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() =>
            {
                out.push(hex(*high) << 4 | hex(*low));
                rest
            }
            [b'\\', escaped, rest @ ..] => {
                out.push(unescape(*escaped));
                rest
            }
            [b'"', rest @ ..] => return Ok(rest),
            [byte, rest @ ..] => {
                out.push(*byte);
                rest
            }
            [] => return Err(ProtocolError::UnbalancedQuotes),
        }
    }
}

fn unescape(byte: u8) -> u8 {
    match byte {
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'b' => 0x08,
        b'a' => 0x07,
        other => other,
    }
}

/// Returns the value of a hexadecimal digit.
fn hex(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        letter => (letter | 0x20) - b'a' + 10,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Result<Vec<String>, ProtocolError> {
        let (mut unquoted, mut ranges) = (Vec::new(), Vec::new());
        split(line.as_bytes(), &mut unquoted, &mut ranges)?;
        let word = |range: &ByteRange| {
            String::from_utf8_lossy(&unquoted[range.start..range.end]).into_owned()
        };
        Ok(ranges.iter().map(word).collect())
    }

    #[test]
    fn words_are_split_and_unquoted() {
        assert_eq!(words("").unwrap(), [""; 0]);
        assert_eq!(words("  ping \t ").unwrap(), ["ping"]);
        assert_eq!(
            words(r#"echo "a \"b\"\n\x41\q" 'c \'d\' \n' """#).unwrap(),
            ["echo", "a \"b\"\nAq", r"c 'd' \n", ""]
        );
        assert_eq!(words(r#"ab"cd" e"#).unwrap(), ["abcd", "e"]);
    }

    #[test]
    fn a_quote_that_does_not_close_a_word_is_refused() {
        for line in [r#""a"#, r#""a"b"#, "'a", "'a'b", r#"""#, r#""a\"#, r#""\""#] {
            assert_eq!(words(line), Err(ProtocolError::UnbalancedQuotes), "{line}");
        }
    }

    #[test]
    fn http_is_rejected() {
        for line in [
            "GET / HTTP/1.1",
            "POST /x HTTP/1.1",
            "post /x HTTP/1.1",
            "Host: 127.0.0.1",
            "host: 127.0.0.1",
        ] {
            assert_eq!(
                words(line),
                Err(ProtocolError::ForAnotherProtocol),
                "{line}"
            );
        }
    }
}
