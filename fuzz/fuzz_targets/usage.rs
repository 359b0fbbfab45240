//! Arbitrary bytes as a language model's response. Scanning must not panic, and the token usage
//! must be the same whether the bytes arrive in one piece or in several. If the bytes are a JSON
//! document, parsing the complete document must give the same usage.
//!
//! The first byte selects the size of the pieces.

#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use tidegate_core::{TokenUsage, bounds};
use tidegate_tower::UsageScanner;

fuzz_target!(|input: &[u8]| {
    let Some((size, body)) = input.split_first() else {
        return;
    };
    let whole = scan(body.chunks(body.len().max(1)));
    let cut = scan(body.chunks(usize::from(*size).max(1)));
    assert_eq!(whole.usage(), cut.usage(), "in pieces");
    for has_ended in [false, true] {
        assert_eq!(
            whole.usage_at_end(has_ended),
            cut.usage_at_end(has_ended),
            "in pieces"
        );
    }
    assert_eq!(whole.was_clamped(), cut.was_clamped(), "in pieces");
    if let Some(usage) = whole.usage() {
        // The scanner adds up at most two JSON fields of the usage.
        let most = 2 * bounds::MAX_TOKENS;
        assert!(usage.input <= most && usage.cached <= most && usage.output <= most);
    }
    if let Ok(document @ Value::Object(_)) = serde_json::from_slice(body) {
        // The canonical form has no duplicate JSON fields.
        let canonical = document.to_string();
        let scanned = scan([canonical.as_bytes()].into_iter());
        assert_eq!(scanned.usage(), naive(&document), "{canonical}");
    }
});

fn scan<'b>(pieces: impl Iterator<Item = &'b [u8]>) -> UsageScanner {
    let mut scanner = UsageScanner::default();
    for piece in pieces {
        scanner.scan(piece);
    }
    scanner
}

/// Returns the largest of the numbers at the pointers.
fn count(document: &Value, pointers: &[&str]) -> Option<u64> {
    let numbers = pointers.iter().filter_map(|pointer| {
        let tokens = whole_number(document.pointer(pointer)?)?;
        Some(tokens.min(bounds::MAX_TOKENS))
    });
    numbers.max()
}

/// Returns a number that is written only with digits. A number that does not fit in 64 bits is
/// capped.
fn whole_number(value: &Value) -> Option<u64> {
    let Value::Number(number) = value else {
        return None;
    };
    let text = number.to_string();
    let is_whole = text.bytes().all(|byte| byte.is_ascii_digit());
    is_whole.then(|| text.parse().unwrap_or(u64::MAX))
}

/// Returns the usage in a document that has been parsed completely.
fn naive(document: &Value) -> Option<TokenUsage> {
    let at = |prefixes: &[&str], member: &str| {
        let pointers: Vec<String> = prefixes
            .iter()
            .map(|prefix| format!("{prefix}/{member}"))
            .collect();
        let pointers: Vec<&str> = pointers.iter().map(String::as_str).collect();
        count(document, &pointers)
    };
    let gemini = |member: &str| at(&["/usageMetadata", "/response/usageMetadata"], member);
    let usual = |member: &str| at(&["/usage", "/response/usage"], member);
    let any = |member: &str| at(&["/usage", "/response/usage", "/message/usage"], member);
    let (prompt, candidates) = (gemini("promptTokenCount"), gemini("candidatesTokenCount"));
    if prompt.or(candidates).is_some() {
        let cached = gemini("cachedContentTokenCount").unwrap_or_default();
        let input =
            prompt.unwrap_or_default() + gemini("toolUsePromptTokenCount").unwrap_or_default();
        return Some(TokenUsage {
            input: input.saturating_sub(cached),
            cached,
            output: candidates.unwrap_or_default()
                + gemini("thoughtsTokenCount").unwrap_or_default(),
        });
    }
    let cached = usual("prompt_tokens_details/cached_tokens")
        .max(usual("input_tokens_details/cached_tokens"))
        .unwrap_or_default();
    let read = any("cache_read_input_tokens").unwrap_or_default();
    let (prompt, completion) = (usual("prompt_tokens"), usual("completion_tokens"));
    if prompt.or(completion).is_some() {
        let cached = cached.max(read);
        return Some(TokenUsage {
            input: prompt.unwrap_or_default().saturating_sub(cached),
            cached,
            output: completion.unwrap_or_default(),
        });
    }
    let (input, output) = (any("input_tokens"), any("output_tokens"));
    input.or(output)?;
    let created = any("cache_creation_input_tokens").unwrap_or_default();
    Some(TokenUsage {
        input: input.unwrap_or_default().saturating_sub(cached) + created,
        cached: cached + read,
        output: output.unwrap_or_default(),
    })
}
