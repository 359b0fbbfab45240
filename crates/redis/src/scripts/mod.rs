//! The Lua scripts. The server identifies each script by its SHA-1 digest.

use std::sync::{LazyLock, OnceLock};

use crate::{call::Script, value_format::kernel};

/// A marker in a script. The code of the algorithms that the call needs replaces this marker.
const KERNELS_MARKER: &str = "-- (the kernels that the programs name come here)\n";

/// A marker in a script. An assignment replaces this marker if one of the needed algorithms has
/// long states.
const LONG_STATES_MARKER: &str = "-- (has_long_states = true)\n";

/// Lua snippets that several scripts share, each with the marker that it replaces in a script.
const SHARED: [(&str, &str); 9] = [
    ("-- (guard.lua)\n", include_str!("guard.lua")),
    ("-- (program.lua)\n", include_str!("program.lua")),
    ("-- (members.lua)\n", include_str!("members.lua")),
    ("-- (receipt.lua)\n", include_str!("receipt.lua")),
    ("-- (lead.lua)\n", include_str!("lead.lua")),
    ("-- (ledger.lua)\n", include_str!("ledger.lua")),
    ("-- (value.lua)\n", include_str!("value.lua")),
    ("-- (weight.lua)\n", include_str!("weight.lua")),
    ("-- (states.lua)\n", include_str!("states.lua")),
];

/// Replaces the markers in `text` with the shared code.
fn expand_markers(text: &str) -> String {
    SHARED
        .iter()
        .fold(text.to_owned(), |text, (marker, shared)| {
            text.replace(marker, shared)
        })
}

/// Decides a request on one key with a single GCRA limit. The limit must not count denied requests,
/// and its unit must be an integer number of microseconds.
pub(crate) static SINGLE_KEY_GCRA: LazyLock<Script> =
    LazyLock::new(|| Script::new(expand_markers(include_str!("single_key_gcra.lua"))));

/// Decides a request on one key whose limits all share a sliding window log.
pub(crate) static SINGLE_KEY_LOG: LazyLock<Script> =
    LazyLock::new(|| Script::new(expand_markers(include_str!("single_key_log.lua"))));

/// The code of the algorithms, indexed by the constants of [`kernel`].
const KERNELS: [&str; 7] = [
    include_str!("gcra.lua"),
    include_str!("interval.lua"),
    include_str!("window.lua"),
    include_str!("log.lua"),
    include_str!("buckets.lua"),
    include_str!("weighted.lua"),
    // Leases use the code of the sliding window log.
    "",
];

/// Returns `check.lua` with the code of the algorithms whose bits are set in `kernels`, and without
/// the other algorithms. Redis executes a script from its first line on every call, so unneeded
/// code would cost time.
pub(crate) fn check(kernels: u8) -> &'static Script {
    static CHECKS: [OnceLock<Script>; 1 << KERNELS.len()] =
        [const { OnceLock::new() }; 1 << KERNELS.len()];
    let kernels = usize::from(kernels) % CHECKS.len();
    CHECKS[kernels].get_or_init(|| {
        let has = |kernel: usize| kernels >> kernel & 1 == 1;
        let needed = (0..KERNELS.len()).filter(|kernel| has(*kernel));
        let texts: String = needed.map(|kernel| KERNELS[kernel]).collect();
        let mut text = expand_markers(&include_str!("check.lua").replace(KERNELS_MARKER, &texts));
        // The states of leases are also long, but the bit of leases need not be checked. Leases use
        // the code of the sliding window log, so the log's bit is always set too.
        if has(kernel::LOG.into()) || has(kernel::BUCKETS.into()) {
            text = text.replace(LONG_STATES_MARKER, "has_long_states = true\n");
        }
        Script::new(text)
    })
}

/// Refunds reservations.
pub(crate) static REFUND: LazyLock<Script> =
    LazyLock::new(|| Script::new(expand_markers(include_str!("refund.lua"))));

/// Renews reservations.
pub(crate) static RENEW_RESERVATION: LazyLock<Script> =
    LazyLock::new(|| Script::new(expand_markers(include_str!("renew_reservation.lua"))));

/// Reads whether a reservation was renewed or has ended.
pub(crate) static READ_GUARD: LazyLock<Script> =
    LazyLock::new(|| Script::new(expand_markers(include_str!("read_guard.lua"))));

/// Stores outstanding reservations, so that another server can end them.
pub(crate) static EXPIRY_QUEUE: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("expiry_queue.lua").to_owned()));

/// Renews concurrency leases.
pub(crate) static RENEW: LazyLock<Script> =
    LazyLock::new(|| Script::new(expand_markers(include_str!("renew.lua"))));

/// Reads values unchanged.
pub(crate) static READ: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("read.lua").to_owned()));

/// Deletes a key with any value.
pub(crate) static DELETE: LazyLock<Script> =
    LazyLock::new(|| Script::new("return redis.call('DEL', KEYS[1])".to_owned()));

/// Writes values if the stored values have not changed since they were read.
pub(crate) static REPLACE: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("replace.lua").to_owned()));

/// Publishes and reads the slices of top talkers.
pub(crate) static TOP: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("top.lua").to_owned()));

/// Publishes and reads recent denials.
pub(crate) static DENIALS: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("denials.lua").to_owned()));

/// Stores overrides and lists their changes.
pub(crate) static OVERRIDES: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("overrides.lua").to_owned()));

/// Counts the servers that share a Redis.
pub(crate) static CENSUS: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("census.lua").to_owned()));

/// Maintains the block index.
pub(crate) static BLOCK_INDEX: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("block_index.lua").to_owned()));

mod fast_path;

pub(crate) use fast_path::{MAX_MEMBERS, fast_path};

#[cfg(test)]
mod tests;
