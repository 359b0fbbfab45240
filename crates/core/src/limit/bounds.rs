//! Named constants for the maximum of every number in a rule or a request. Every constructor that
//! validates a number uses these constants.

use crate::{error::LimitError, time::Span};

/// The largest count, cost, burst or capacity: 10^15 - 1, the largest integer that an HTTP
/// structured field can contain. A Lua number (a double) represents this count, and the sum of up
/// to nine counts, exactly.
pub const MAX_COUNT: u64 = 999_999_999_999_999;

pub use crate::time::MAX_PERIOD;

/// The longest time that a bucket can take to fill or drain completely: 100 years of 365.25 days.
pub const MAX_DRAIN: Span = Span::from_secs(3_155_760_000);

/// The largest limit of a sliding window log. This maximum bounds the memory per key.
pub const MAX_LOG_LIMIT: u64 = 100_000;

/// The longest time that a request can wait for a concurrency slot.
pub const MAX_SLOT_WAIT: Span = Span::from_secs(60);

/// The maximum number of requests waiting for a concurrency slot per key.
pub const MAX_SLOT_QUEUE: u64 = 10_000;

/// The maximum number of sub-windows in a sliding window counter.
pub const MAX_BUCKETS: u32 = 1_000;

/// The largest number of tokens of one kind that a request to a language model can use. A larger
/// number in a response is replaced by this maximum.
pub const MAX_TOKENS: u64 = 1_000_000_000;

/// The largest weight in a token formula.
pub const MAX_TOKEN_WEIGHT: u64 = 1_000_000;

/// The maximum number of JSON pointers per rule.
pub const MAX_BODY_POINTERS: usize = 16;

/// The maximum number of levels in a JSON pointer.
pub const MAX_POINTER_DEPTH: usize = 16;

/// The maximum number of limits per rule.
pub const MAX_LIMITS_PER_RULE: usize = 16;

/// The maximum number of charges (matching rules) per request.
pub const MAX_CHARGES: usize = 64;

/// The maximum number of pattern evaluations for finding the rules that match a request. A pattern
/// that scans the whole value counts as one additional evaluation for each KiB of the value. A rule
/// set is rejected if an ordinary request could need more evaluations. A request that needs more
/// evaluations is rejected.
pub const MAX_EVALUATIONS: usize = 4_096;

/// The maximum number of entries (named values, such as `ip`) per request.
pub const MAX_ENTRIES: usize = 64;

/// The maximum length of an entry name, in bytes.
pub const MAX_ENTRY_NAME_BYTES: usize = 256;

/// The maximum length of an entry value, in bytes.
pub const MAX_ENTRY_VALUE_BYTES: usize = 8_192;

/// The maximum length of a key in bytes. A key contains the values of all key entries of the rule.
pub const MAX_KEY_BYTES: usize = 1_024;

/// The maximum number of entries in a rule's key.
pub const MAX_KEY_ENTRIES: usize = 16;

/// The maximum length of a rule name, in bytes.
pub const MAX_RULE_NAME_BYTES: usize = 128;

/// The maximum length of a glob or a regular expression, in bytes.
pub const MAX_PATTERN_BYTES: usize = 1_024;

/// The maximum number of wildcards (`*` or `**`) in one glob.
pub const MAX_WILDCARDS: usize = 16;

/// The maximum nesting depth of lists and negations in one condition.
pub const MAX_PATTERN_DEPTH: usize = 8;

/// The maximum number of time ranges in a rule's time-of-day condition.
pub const MAX_HOURS: usize = 16;

/// The maximum size of one compiled regular expression in memory, in bytes.
pub const MAX_REGEX_BYTES: usize = 1 << 20;

/// The maximum number of rules in one rules file.
pub const MAX_RULES: usize = 100_000;

/// The maximum number of overrides, for all rules together.
pub const MAX_OVERRIDES: usize = 1_000_000;

/// The maximum number of overrides with a pattern, per rule.
pub const MAX_OVERRIDE_PATTERNS: usize = 1_000;

/// The maximum number of plans per rule.
pub const MAX_PLANS: usize = 1_000;

/// The maximum number of former limits per rule, including the limits of its plans and overrides,
/// whose states can be converted exactly. The store keeps the parameters of these limits.
pub const MAX_FORMER_LIMITS: usize = 4_096;

/// The maximum number of manual blocks that can be active at the same time.
pub const MAX_BLOCKS: usize = 100_000;

/// The maximum number of blocks by entries, for all rules together.
pub const MAX_ENTRY_BLOCKS: usize = 100_000;

/// The maximum number of different forms of the blocks by entries that do not depend on a rule, and
/// of the blocks of each rule. A form is a combination of entry names and prefix lengths. A request
/// is looked up once for each form.
pub const MAX_ENTRY_BLOCK_FORMS: usize = 64;

/// The maximum length of a line in an access log or a file of recorded requests, in bytes.
pub const MAX_LOG_LINE_BYTES: usize = 1 << 20;

/// The maximum length of the reason for a manual block or an override, in bytes.
pub const MAX_REASON_BYTES: usize = 1_024;

/// Returns an error if `count` is not between `least` and [`MAX_COUNT`], inclusive.
pub(crate) fn check_count(field: &'static str, count: u64, least: u64) -> Result<(), LimitError> {
    if count < least {
        return Err(LimitError::new(
            field,
            format!("must be at least {least}, got {count}"),
        ));
    }
    if count > MAX_COUNT {
        return Err(LimitError::new(
            field,
            format!("{count} exceeds the maximum of {MAX_COUNT}"),
        ));
    }
    Ok(())
}

/// Returns the smallest valid capacity of a leaky bucket: 0 for a queue, 1 otherwise. A queue with
/// capacity 0 serves one request at a time, and no other request can wait.
pub(crate) fn least_capacity(queue: bool) -> u64 {
    u64::from(!queue)
}

/// Returns an error if `span` is zero or longer than [`MAX_PERIOD`].
pub(crate) fn check_period(field: &'static str, span: Span) -> Result<(), LimitError> {
    if span == Span::ZERO {
        return Err(LimitError::new(field, "must be longer than zero"));
    }
    if span > MAX_PERIOD {
        return Err(LimitError::new(
            field,
            format!("{span} exceeds the maximum of {MAX_PERIOD} (10 years)"),
        ));
    }
    Ok(())
}
