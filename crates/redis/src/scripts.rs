//! The scripts, each known to the server by its digest.

use std::sync::{LazyLock, OnceLock};

use crate::call::Script;

/// Where a script leaves room for the kernels that it needs.
const ROOM: &str = "-- (the kernels that the programs name come here)\n";

/// What several scripts share, by the comments that stand in its place.
const SHARED: [(&str, &str); 2] = [
    ("-- (value.lua)\n", include_str!("scripts/value.lua")),
    ("-- (states.lua)\n", include_str!("scripts/states.lua")),
];

/// A script with what it shares with others.
fn whole(text: &str) -> String {
    SHARED
        .iter()
        .fold(text.to_owned(), |text, (place, shared)| {
            text.replace(place, shared)
        })
}

/// One key, one hard schedule whose unit is a whole number of microseconds.
pub(crate) static SCHEDULE_ALONE: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("scripts/schedule_alone.lua").to_owned()));

/// The same for several of them.
pub(crate) static SCHEDULES_ALONE: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("scripts/schedules_alone.lua").to_owned()));

/// One key, limits that share one log.
pub(crate) static LOG_ALONE: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("scripts/log_alone.lua").to_owned()));

/// The kernels, by the numbers of [`kernel`](crate::encode::kernel).
const KERNELS: [&str; 7] = [
    include_str!("scripts/schedule.lua"),
    include_str!("scripts/interval.lua"),
    include_str!("scripts/window.lua"),
    include_str!("scripts/log.lua"),
    include_str!("scripts/buckets.lua"),
    include_str!("scripts/weighted.lua"),
    // A lease is an entry of a log.
    "ask[6], charge[6] = ask[3], charge[3]\n",
];

/// `check.lua` with the kernels of these bits and no others: a script is run from its first line to its last, so
/// what it does not need costs time.
pub(crate) fn check(kernels: u8) -> &'static Script {
    static CHECKS: [OnceLock<Script>; 1 << KERNELS.len()] =
        [const { OnceLock::new() }; 1 << KERNELS.len()];
    let kernels = usize::from(kernels) % CHECKS.len();
    CHECKS[kernels].get_or_init(|| {
        let needed = (0..KERNELS.len()).filter(|kernel| kernels >> kernel & 1 == 1);
        let texts: String = needed.map(|kernel| KERNELS[kernel]).collect();
        Script::new(whole(include_str!("scripts/check.lua")).replace(ROOM, &texts))
    })
}

/// Gives back what was reserved.
pub(crate) static GIVE_BACK: LazyLock<Script> =
    LazyLock::new(|| Script::new(whole(include_str!("scripts/give_back.lua"))));

/// Renews leases.
pub(crate) static RENEW: LazyLock<Script> =
    LazyLock::new(|| Script::new(whole(include_str!("scripts/renew.lua"))));

/// Reads values as they are.
pub(crate) static READ: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("scripts/read.lua").to_owned()));

/// Deletes a key, whatever stands there.
pub(crate) static FORGET: LazyLock<Script> =
    LazyLock::new(|| Script::new("return redis.call('DEL', KEYS[1])".to_owned()));

/// Writes values over others, if those still stand.
pub(crate) static REPLACE: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("scripts/replace.lua").to_owned()));

/// Counts the servers that share a Redis.
pub(crate) static CENSUS: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("scripts/census.lua").to_owned()));

/// Keeps the list of blocks.
pub(crate) static BLOCK_INDEX: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("scripts/block_index.lua").to_owned()));

#[cfg(test)]
mod tests;
