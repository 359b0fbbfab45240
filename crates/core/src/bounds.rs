//! Every maximum, by name. A constructor that refuses a number refuses it because of a line here.

use crate::{
    limit::{LimitError, Rate},
    time::Span,
};

/// The largest count, cost, burst or capacity: 10^15 - 1, the largest integer that an HTTP structured
/// field carries, and exact in Lua's doubles with room to add.
pub const MAX_COUNT: u64 = 999_999_999_999_999;

/// The longest period, window or interval: 10 years of 365.25 days.
pub const MAX_PERIOD: Span = Span::from_secs(315_576_000);

/// The longest time that a bucket may take to fill or drain: 100 years of 365.25 days.
pub const MAX_DRAIN: Span = Span::from_secs(3_155_760_000);

/// The largest limit of a sliding log: what one key may hold in memory follows from it.
pub const MAX_LOG_LIMIT: u64 = 100_000;

/// The most sub-windows of a sliding counter.
pub const MAX_BUCKETS: u32 = 1_000;

/// The most limits of one rule.
pub const MAX_LIMITS_PER_RULE: usize = 16;

/// The most charges (rules that apply) of one request.
pub const MAX_CHARGES: usize = 64;

/// The most evaluations that it may take to find the rules of one request: patterns that are held against
/// its values, where one that reads through a whole value counts once more for each KiB of it. Rules of
/// which any request could take more are refused, and so is a request that was made to take more.
pub const MAX_EVALUATIONS: usize = 4_096;

/// The most entries of one request.
pub const MAX_ENTRIES: usize = 64;

/// The longest name of an entry, in bytes.
pub const MAX_ENTRY_NAME_BYTES: usize = 256;

/// The longest value of an entry, in bytes.
pub const MAX_ENTRY_VALUE_BYTES: usize = 8_192;

/// The longest key, in bytes, after the rule's entries have been joined.
pub const MAX_KEY_BYTES: usize = 1_024;

/// The most entries of one rule's key.
pub const MAX_KEY_ENTRIES: usize = 16;

/// The longest name of a rule, in bytes.
pub const MAX_RULE_NAME_BYTES: usize = 128;

/// The longest glob or regular expression, in bytes.
pub const MAX_PATTERN_BYTES: usize = 1_024;

/// The most runs (`*`) in one glob.
pub const MAX_WILDCARDS: usize = 16;

/// The deepest nesting of lists and negations in one condition.
pub const MAX_PATTERN_DEPTH: usize = 8;

/// The most times of day in one schedule.
pub const MAX_HOURS: usize = 16;

/// The most memory that one compiled regular expression may take, in bytes.
pub const MAX_REGEX_BYTES: usize = 1 << 20;

/// The most rules of one rules file.
pub const MAX_RULES: usize = 100_000;

/// The most manual blocks at once.
pub const MAX_BLOCKS: usize = 100_000;

/// The longest reason of a manual block, in bytes.
pub const MAX_REASON_BYTES: usize = 1_024;

/// Checks that `count` is from `least` to [`MAX_COUNT`].
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
            format!("{count} is over the maximum of {MAX_COUNT}"),
        ));
    }
    Ok(())
}

/// The least capacity of a bucket: a queue in which nobody waits still serves whoever is in turn.
pub(crate) fn least_capacity(queue: bool) -> u64 {
    u64::from(!queue)
}

/// Checks that `span` is longer than zero and at most [`MAX_PERIOD`].
pub(crate) fn check_period(field: &'static str, span: Span) -> Result<(), LimitError> {
    if span == Span::ZERO {
        return Err(LimitError::new(field, "must be longer than zero"));
    }
    if span > MAX_PERIOD {
        return Err(LimitError::new(
            field,
            format!("{span} is over the maximum of {MAX_PERIOD} (10 years)"),
        ));
    }
    Ok(())
}

/// Checks a rate's count and period.
pub(crate) fn check_rate(field: &'static str, rate: Rate) -> Result<(), LimitError> {
    if rate.count == 0 {
        let problem = "a rate admits at least 1, got 0; to deny everything use a window: \
            {algorithm: fixed_window, limit: 0, window: 1min}";
        return Err(LimitError::new(field, problem));
    }
    check_count(field, rate.count, 1)?;
    check_period(field, rate.period)
}
