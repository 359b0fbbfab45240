//! Token usage of language models, read from responses as they are forwarded.
//!
//! [`UsageScanner`] reads a response in pieces of any size and does not store them. The scanner
//! recognises the usage fields of the OpenAI, Anthropic and Gemini APIs in a JSON document or an
//! event stream. A JSON parser such as `serde_json` would need the whole document, or a thread that
//! waits for the rest of the document. The scanner therefore has its own tokenizer, which uses a
//! fixed amount of memory.
//!
//! | API | fields |
//! | --- | --- |
//! | OpenAI chat completions | `usage`: `prompt_tokens`, `completion_tokens` |
//! | OpenAI responses | `usage` or `response.usage`: `input_tokens`, `output_tokens` |
//! | Anthropic messages | `usage` or `message.usage`: `input_tokens`, `output_tokens` |
//! | Gemini | `usageMetadata`: `promptTokenCount`, `candidatesTokenCount`, and more |
//!
//! The counts in a stream are cumulative, so the scanner uses the largest value of each field.

mod events;
mod json;
#[cfg(test)]
mod tests;

use tidegate_core::{TokenUsage, bounds};

use self::{events::EventStreamScanner, json::JsonScanner};

/// In a response that was cut off, this number of text bytes counts as one output token.
const BYTES_PER_TOKEN: u64 = 4;

/// Reads the number of tokens from the body of a language model's response.
///
/// # Examples
///
/// ```
/// use tidegate_core::TokenUsage;
/// use tidegate_tower::UsageScanner;
///
/// let mut scanner = UsageScanner::default();
/// for piece in ["data: {\"usage\": {\"prompt_tok", "ens\": 12, \"completion_tokens\": 3}}\n\n"] {
///     scanner.scan(piece.as_bytes());
/// }
/// let expected = TokenUsage { input: 12, cached: 0, output: 3 };
/// assert_eq!(scanner.usage(), Some(expected));
/// ```
#[derive(Clone, Debug, Default)]
pub struct UsageScanner {
    format: BodyFormat,
    counts: UsageCounts,
}

/// The format of a body, determined by its first significant byte.
#[derive(Clone, Debug, Default)]
enum BodyFormat {
    #[default]
    Unknown,
    Json(JsonScanner),
    EventStream(EventStreamScanner),
}

impl UsageScanner {
    /// Reads the next bytes of the body.
    pub fn scan(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        if matches!(self.format, BodyFormat::Unknown) {
            // A byte order mark may precede an event stream.
            let is_blank =
                |byte: &u8| matches!(byte, b' ' | b'\t' | b'\r' | b'\n' | 0xEF | 0xBB | 0xBF);
            let Some(start) = bytes.iter().position(|byte| !is_blank(byte)) else {
                return;
            };
            // Indexing cannot panic, because the position was found in the same slice.
            rest = &bytes[start..];
            self.format = match bytes[start] {
                b'{' | b'[' => BodyFormat::Json(JsonScanner::default()),
                _ => BodyFormat::EventStream(EventStreamScanner::default()),
            };
        }
        match &mut self.format {
            BodyFormat::Json(json) => json.scan(rest, &mut self.counts),
            BodyFormat::EventStream(events) => events.scan(rest, &mut self.counts),
            BodyFormat::Unknown => {}
        }
    }

    /// Returns the usage in the response so far. Returns `None` if the response has not contained
    /// any usage yet.
    #[must_use]
    pub fn usage(&self) -> Option<TokenUsage> {
        self.counts.usage()
    }

    /// Returns the usage of a response that ends here. If the response was cut off or did not
    /// contain its final usage, every four bytes of text so far count as at least one output token.
    #[must_use]
    pub fn usage_at_end(&self, has_ended: bool) -> Option<TokenUsage> {
        let usage = self.usage()?;
        if has_ended && self.counts.is_final {
            return Some(usage);
        }
        let seen = self.counts.text_bytes.div_ceil(BYTES_PER_TOKEN);
        let seen = seen.min(bounds::MAX_TOKENS);
        Some(TokenUsage {
            output: usage.output.max(seen),
            ..usage
        })
    }

    /// Returns true if a number of tokens in the response was above [`bounds::MAX_TOKENS`]. Such a
    /// number was replaced with this maximum.
    #[must_use]
    pub fn was_clamped(&self) -> bool {
        self.counts.was_clamped
    }
}

/// A JSON field that contains a number of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TokenField {
    PromptTokens,
    CompletionTokens,
    InputTokens,
    OutputTokens,
    /// `cached_tokens` in the details of OpenAI's input. The number of input tokens includes the
    /// cached tokens.
    CachedTokens,
    /// Anthropic's cache reads, which are not included in its `input_tokens`.
    CacheReadInputTokens,
    /// Anthropic's cache writes, which are not included in its `input_tokens`.
    CacheCreationInputTokens,
    PromptTokenCount,
    CandidatesTokenCount,
    /// Gemini's cached tokens, which are included in its prompt tokens.
    CachedContentTokenCount,
    /// Gemini's reasoning tokens, which are not included in its candidate tokens.
    ThoughtsTokenCount,
    ToolUsePromptTokenCount,
}

/// The number of variants of [`TokenField`].
const MEMBERS: usize = TokenField::ToolUsePromptTokenCount as usize + 1;

/// The largest value of each field, and other data that the scanner keeps for a response.
#[derive(Clone, Debug, Default)]
struct UsageCounts {
    members: [Option<u64>; MEMBERS],
    /// Whether the scanner has read the final usage. Anthropic's first event contains only a
    /// preliminary usage.
    is_final: bool,
    was_clamped: bool,
    /// The number of bytes of generated text, in JSON strings.
    text_bytes: u64,
}

impl UsageCounts {
    fn set(&mut self, member: TokenField, tokens: u64) {
        self.was_clamped |= tokens > bounds::MAX_TOKENS;
        let tokens = tokens.min(bounds::MAX_TOKENS);
        // The array has an element for each variant.
        let known = &mut self.members[member as usize];
        *known = Some(known.map_or(tokens, |known| known.max(tokens)));
    }

    fn usage(&self) -> Option<TokenUsage> {
        let known = |member: TokenField| self.members[member as usize];
        let count = |member: TokenField| known(member).unwrap_or_default();
        let has =
            |one: TokenField, other: TokenField| known(one).is_some() || known(other).is_some();
        // Each number is at most MAX_TOKENS, so no sum overflows.
        if has(
            TokenField::PromptTokenCount,
            TokenField::CandidatesTokenCount,
        ) {
            let prompt =
                count(TokenField::PromptTokenCount) + count(TokenField::ToolUsePromptTokenCount);
            let cached = count(TokenField::CachedContentTokenCount);
            return Some(TokenUsage {
                input: prompt.saturating_sub(cached),
                cached,
                output: count(TokenField::CandidatesTokenCount)
                    + count(TokenField::ThoughtsTokenCount),
            });
        }
        if has(TokenField::PromptTokens, TokenField::CompletionTokens) {
            // Some gateways add Anthropic's cache fields to OpenAI's format. In that format, the
            // prompt tokens include the cached tokens.
            let cached =
                count(TokenField::CachedTokens).max(count(TokenField::CacheReadInputTokens));
            return Some(TokenUsage {
                input: count(TokenField::PromptTokens).saturating_sub(cached),
                cached,
                output: count(TokenField::CompletionTokens),
            });
        }
        if has(TokenField::InputTokens, TokenField::OutputTokens) {
            // OpenAI's input tokens include its cached tokens. Anthropic's input tokens exclude
            // cache reads and cache writes. A response has only the fields of one of the two APIs.
            let fresh =
                count(TokenField::InputTokens).saturating_sub(count(TokenField::CachedTokens));
            return Some(TokenUsage {
                input: fresh + count(TokenField::CacheCreationInputTokens),
                cached: count(TokenField::CachedTokens) + count(TokenField::CacheReadInputTokens),
                output: count(TokenField::OutputTokens),
            });
        }
        None
    }
}
