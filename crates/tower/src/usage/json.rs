//! A tokenizer that finds the token usage in JSON documents that arrive in pieces.
//!
//! The scanner follows only the path to the usage fields. For all other parts of the document, it
//! tracks only the nesting depth. The scanner does not validate the document: the usage in invalid
//! JSON may be missing or wrong.

use super::{TokenField, UsageCounts};

/// The maximum length of a field name in bytes. Longer names do not match any known name.
const MAX_NAME: usize = 32;

/// The maximum number of nested [`Container`]s. The deepest nesting is array, document, wrapper,
/// usage, details.
const MAX_CONTAINERS: usize = 5;

/// Replaces an escaped character in a field name if no known name contains such a character.
const UNKNOWN: u8 = 0xFF;

/// A container on the path to the usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    /// An array of documents, which Gemini sends without `alt=sse`.
    Array,
    /// The document itself.
    Document,
    /// The field `response` of a document.
    Response,
    /// The field `message` of a document, which occurs in Anthropic's first event.
    Message,
    /// The field `usage` of a document or of its `response`.
    Usage,
    /// The field `usage` of a `message`.
    FirstUsage,
    /// The details of OpenAI's input tokens.
    Details,
    /// The field `usageMetadata`.
    UsageMetadata,
}

impl Container {
    /// Returns the kind of the container that is the field `name` of `parent` and starts with
    /// `bracket`. Returns `None` if the usage cannot be inside this container.
    fn of(parent: Option<Self>, name: &[u8], bracket: u8) -> Option<Self> {
        if bracket == b'[' {
            return parent.is_none().then_some(Self::Array);
        }
        match (parent, name) {
            (None | Some(Self::Array), _) => Some(Self::Document),
            (Some(Self::Document), b"response") => Some(Self::Response),
            (Some(Self::Document), b"message") => Some(Self::Message),
            (Some(Self::Document | Self::Response), b"usage") => Some(Self::Usage),
            (Some(Self::Message), b"usage") => Some(Self::FirstUsage),
            (Some(Self::Document | Self::Response), b"usageMetadata") => Some(Self::UsageMetadata),
            (Some(Self::Usage), b"prompt_tokens_details" | b"input_tokens_details") => {
                Some(Self::Details)
            }
            _ => None,
        }
    }

    /// Returns the field `name` of this container, if it contains a number of tokens.
    fn member(self, name: &[u8]) -> Option<TokenField> {
        match (self, name) {
            (Self::Usage, b"prompt_tokens") => Some(TokenField::PromptTokens),
            (Self::Usage, b"completion_tokens") => Some(TokenField::CompletionTokens),
            (Self::Usage | Self::FirstUsage, b"input_tokens") => Some(TokenField::InputTokens),
            (Self::Usage | Self::FirstUsage, b"output_tokens") => Some(TokenField::OutputTokens),
            (Self::Usage | Self::FirstUsage, b"cache_read_input_tokens") => {
                Some(TokenField::CacheReadInputTokens)
            }
            (Self::Usage | Self::FirstUsage, b"cache_creation_input_tokens") => {
                Some(TokenField::CacheCreationInputTokens)
            }
            (Self::Details, b"cached_tokens") => Some(TokenField::CachedTokens),
            (Self::UsageMetadata, b"promptTokenCount") => Some(TokenField::PromptTokenCount),
            (Self::UsageMetadata, b"candidatesTokenCount") => {
                Some(TokenField::CandidatesTokenCount)
            }
            (Self::UsageMetadata, b"cachedContentTokenCount") => {
                Some(TokenField::CachedContentTokenCount)
            }
            (Self::UsageMetadata, b"thoughtsTokenCount") => Some(TokenField::ThoughtsTokenCount),
            (Self::UsageMetadata, b"toolUsePromptTokenCount") => {
                Some(TokenField::ToolUsePromptTokenCount)
            }
            _ => None,
        }
    }
}

/// The names of fields with generated text, anywhere in the document.
const TEXTS: [&[u8]; 10] = [
    b"content",
    b"text",
    b"delta",
    b"thinking",
    b"partial_json",
    b"arguments",
    b"reasoning",
    b"reasoning_content",
    b"refusal",
    b"transcript",
];

/// A field name, or the beginning of any other string.
#[derive(Clone, Copy, Debug, Default)]
struct FieldName {
    bytes: [u8; MAX_NAME],
    length: usize,
}

impl FieldName {
    fn push(&mut self, byte: u8) {
        // The length of a name is counted even if the name is too long. Therefore the name cannot
        // be mistaken for a known name.
        if let Some(next) = self.bytes.get_mut(self.length) {
            *next = byte;
        }
        self.length = self.length.saturating_add(1);
    }

    /// Returns the name; an empty slice if the name is too long.
    fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

/// The token at the scanner's current position.
#[derive(Clone, Copy, Debug, Default)]
enum Token {
    #[default]
    None,
    /// A string, and its length in bytes so far.
    String { bytes: u64 },
    /// A string after a backslash.
    Escape { bytes: u64 },
    /// A string after `\u`, with the number of hexadecimal digits read so far and their value.
    Unicode { bytes: u64, digits: u8, code: u32 },
    /// A number or literal outside of strings. The value is the number read so far if the token has
    /// only digits; otherwise, it is `None`.
    Scalar(Option<u64>),
}

/// A scanner for a sequence of JSON documents.
#[derive(Clone, Debug, Default)]
pub(super) struct JsonScanner {
    token: Token,
    /// The containers on the path to the usage.
    containers: [Option<Container>; MAX_CONTAINERS],
    /// The number of `containers` that are in use.
    depth: usize,
    /// The number of open containers that are inside the last container but not on the path to the
    /// usage.
    skipped: usize,
    /// The name of the current field.
    name: FieldName,
    /// Whether the colon after the name was read, so that a value follows.
    is_value: bool,
}

impl JsonScanner {
    pub(super) fn scan(&mut self, bytes: &[u8], counts: &mut UsageCounts) {
        let mut rest = bytes;
        while let Some((byte, after)) = rest.split_first() {
            match self.token {
                Token::String { bytes } => {
                    // Most bytes are inside strings, so skip to the end of the string or an escape.
                    let end = rest.iter().position(|byte| matches!(byte, b'"' | b'\\'));
                    let (text, next) = rest.split_at(end.unwrap_or(rest.len()));
                    rest = next;
                    self.read_text(text, bytes, counts, &mut rest);
                }
                Token::Escape { .. } | Token::Unicode { .. } => {
                    self.read_escape(*byte);
                    rest = after;
                }
                Token::Scalar(digits) => {
                    if is_of_scalar(*byte) {
                        self.token =
                            Token::Scalar(digits.and_then(|value| add_digit(value, *byte)));
                        rest = after;
                    } else {
                        self.end_scalar(digits, counts);
                    }
                }
                Token::None => {
                    self.read_structure(*byte);
                    rest = after;
                }
            }
        }
    }

    /// Reads `text`, the next part of a string. `length` is the number of bytes of the string
    /// before `text`. `rest` begins with the quote or backslash after `text`, or is empty.
    fn read_text(&mut self, text: &[u8], length: u64, counts: &mut UsageCounts, rest: &mut &[u8]) {
        if !self.is_value {
            for byte in text.iter().take(MAX_NAME + 1) {
                self.name.push(*byte);
            }
        }
        // The length of a buffer in memory fits in 64 bits.
        let bytes = length.saturating_add(text.len() as u64);
        self.token = Token::String { bytes };
        let Some((end, after)) = rest.split_first() else {
            return;
        };
        *rest = after;
        if *end == b'\\' {
            self.token = Token::Escape { bytes };
            return;
        }
        self.token = Token::None;
        if self.is_value && TEXTS.contains(&self.name.bytes()) {
            counts.text_bytes = counts.text_bytes.saturating_add(bytes);
        }
    }

    fn read_escape(&mut self, byte: u8) {
        let (escaped, bytes) = match self.token {
            Token::Escape { bytes } if byte == b'u' => {
                self.token = Token::Unicode {
                    bytes: bytes.saturating_add(1),
                    digits: 0,
                    code: 0,
                };
                return;
            }
            Token::Escape { bytes } => {
                let is_itself = matches!(byte, b'"' | b'\\' | b'/');
                (if is_itself { byte } else { UNKNOWN }, bytes)
            }
            Token::Unicode {
                bytes,
                digits,
                code,
            } => {
                let digit = char::from(byte).to_digit(16).unwrap_or_default();
                let code = code << 4 | digit;
                if digits < 3 {
                    self.token = Token::Unicode {
                        bytes,
                        digits: digits + 1,
                        code,
                    };
                    return;
                }
                let ascii = u8::try_from(code).ok().filter(u8::is_ascii);
                (ascii.unwrap_or(UNKNOWN), bytes)
            }
            Token::None | Token::String { .. } | Token::Scalar(_) => return,
        };
        if !self.is_value {
            self.name.push(escaped);
        }
        // An escape counts as one byte of text.
        self.token = Token::String {
            bytes: bytes.saturating_add(1),
        };
    }

    fn read_structure(&mut self, byte: u8) {
        match byte {
            b'"' => {
                if !self.is_value {
                    self.name = FieldName::default();
                }
                self.token = Token::String { bytes: 0 };
            }
            b':' => self.is_value = true,
            b',' => self.end_member(),
            b'{' | b'[' => {
                self.open(byte);
                self.end_member();
            }
            b'}' | b']' => {
                self.close();
                self.end_member();
            }
            b' ' | b'\t' | b'\r' | b'\n' => {}
            digit => self.token = Token::Scalar(add_digit(0, digit)),
        }
    }

    fn end_member(&mut self) {
        self.name = FieldName::default();
        self.is_value = false;
    }

    fn open(&mut self, bracket: u8) {
        let container = if self.skipped == 0 {
            Container::of(self.innermost(), self.name.bytes(), bracket)
        } else {
            None
        };
        match (container, self.containers.get_mut(self.depth)) {
            (Some(container), Some(next)) => {
                *next = Some(container);
                self.depth += 1;
            }
            _ => self.skipped = self.skipped.saturating_add(1),
        }
    }

    fn close(&mut self) {
        if self.skipped > 0 {
            self.skipped -= 1;
        } else {
            self.depth = self.depth.saturating_sub(1);
        }
    }

    /// Returns the innermost container on the path to the usage.
    fn innermost(&self) -> Option<Container> {
        let last = self.depth.checked_sub(1)?;
        self.containers.get(last).copied().flatten()
    }

    fn end_scalar(&mut self, digits: Option<u64>, counts: &mut UsageCounts) {
        self.token = Token::None;
        if self.skipped > 0 || !self.is_value {
            return;
        }
        let Some(container) = self.innermost() else {
            return;
        };
        if let (Some(tokens), Some(member)) = (digits, container.member(self.name.bytes())) {
            counts.set(member, tokens);
            counts.is_final |= container != Container::FirstUsage;
        }
    }
}

/// Returns whether the byte continues a number or a literal such as `null`.
fn is_of_scalar(byte: u8) -> bool {
    !matches!(
        byte,
        b'"' | b':' | b',' | b'{' | b'}' | b'[' | b']' | b' ' | b'\t' | b'\r' | b'\n'
    )
}

/// Returns `value` with another decimal digit. A number that is too large saturates. Returns `None`
/// if a character is not a digit, because the scalar is then not an integer.
fn add_digit(value: u64, byte: u8) -> Option<u64> {
    let digit = char::from(byte).to_digit(10)?;
    Some(value.saturating_mul(10).saturating_add(u64::from(digit)))
}
