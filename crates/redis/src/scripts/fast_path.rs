//! Assembles `fast_path.lua` for a sequence of algorithms.

use std::sync::OnceLock;

use tidegate_core::remote_eval::CLOCK_JUMP;

use super::expand_markers;
use crate::{call::Script, value_format::kernel};

/// The maximum number of members (algorithms with parameters) in a fast-path script. The number of
/// possible scripts grows exponentially with this maximum.
pub(crate) const MAX_MEMBERS: usize = 4;

/// An algorithm that the fast path supports. In the parameter names and in the Lua code, N stands
/// for the member's index.
struct FastKernel {
    /// The algorithm ID.
    kernel: u8,
    /// How many bytes the algorithm ID and the parameters take in a value's header.
    head_bytes: usize,
    /// The names of a member's parameters.
    numbers: &'static str,
    numbers_format: &'static str,
    /// The names of the numbers in the state.
    state: &'static str,
    state_format: &'static str,
    state_bytes: usize,
    /// The names of the numbers that are written as the new state.
    written: &'static str,
    /// The Lua code that evaluates and charges a member.
    code: &'static str,
}

const FAST_KERNELS: [FastKernel; 4] = [
    FastKernel {
        kernel: kernel::GCRA,
        head_bytes: 4,
        numbers: "duration_N, tau_N, lead_N",
        numbers_format: "I7I7I1",
        state: "arrival_N, stored_lead_N",
        state_format: "I7I1",
        state_bytes: 8,
        written: "arrival_N, lead_N",
        code: include_str!("fast_path/gcra.lua"),
    },
    FastKernel {
        kernel: kernel::INTERVAL,
        head_bytes: 9,
        numbers: "refill_N, every_N, capacity_N, cost_N, lead_N",
        numbers_format: "I7I7I7I7I1",
        state: "full_at_N, last_N, stored_lead_N",
        state_format: "I7I7I1",
        state_bytes: 15,
        written: "full_at_N, last_N, lead_N",
        code: include_str!("fast_path/interval.lua"),
    },
    FastKernel {
        kernel: kernel::WINDOW,
        head_bytes: 5,
        numbers: "limit_N, cost_N, is_epoch_N, span_N",
        numbers_format: "I7I7I1I7",
        state: "count_N, ends_N",
        state_format: "I7I7",
        state_bytes: 14,
        written: "count_N, ends_N",
        code: include_str!("fast_path/window.lua"),
    },
    FastKernel {
        kernel: kernel::WEIGHTED,
        head_bytes: 5,
        numbers: "limit_N, window_N, cost_N",
        numbers_format: "I7I7I7",
        state: "index_N, previous_N, current_N, stored_window_N",
        state_format: "I7I7I7I7",
        state_bytes: 28,
        written: "index_N, previous_N, current_N, window_N",
        code: include_str!("fast_path/weighted.lua"),
    },
];

/// Returns the script for a key whose members use these algorithms. Also returns the length of the
/// value header that the script expects. Returns `None` if no script supports these algorithms.
pub(crate) fn fast_path(kernels: &[u8]) -> Option<(&'static Script, usize)> {
    // The index is a number whose digits identify the algorithms of the members. The digit 0 means
    // that there are no further members.
    const BASE: usize = FAST_KERNELS.len() + 1;
    const COUNT: usize = {
        let (mut count, mut members) = (1, 0);
        while members < MAX_MEMBERS {
            (count, members) = (count * BASE, members + 1);
        }
        count
    };
    static SCRIPTS: [OnceLock<Script>; COUNT] = [const { OnceLock::new() }; COUNT];
    if kernels.is_empty() || kernels.len() > MAX_MEMBERS {
        return None;
    }
    let (mut index, mut head_bytes) = (0, if kernels.len() > 1 { 2 } else { 0 });
    let mut members = [&FAST_KERNELS[0]; MAX_MEMBERS];
    for (member, kernel) in members.iter_mut().zip(kernels) {
        let number = FAST_KERNELS
            .iter()
            .position(|fast| fast.kernel == *kernel)?;
        *member = &FAST_KERNELS[number];
        index = index * BASE + number + 1;
        head_bytes += member.head_bytes;
    }
    let script =
        SCRIPTS[index].get_or_init(|| Script::new(assemble(&members[..kernels.len()], head_bytes)));
    Some((script, head_bytes))
}

/// Returns the script's source for these members.
fn assemble(members: &[&FastKernel], head_bytes: usize) -> String {
    let numbered = |text: &str, number: usize| text.replace("_N", &format!("_{number}"));
    let all = |part: fn(&FastKernel) -> &'static str, separator: &str| {
        let parts: Vec<String> = (1..)
            .zip(members)
            .map(|(number, member)| numbered(part(member), number))
            .collect();
        parts.join(separator)
    };
    let states = all(|member| member.state, ", ");
    let state_formats = all(|member| member.state_format, "");
    let state_bytes: usize = members.iter().map(|member| member.state_bytes).sum();
    let zeros = vec!["0"; states.split(", ").count()].join(", ");
    let text = include_str!("fast_path.lua")
        .replace(
            "NUMBERS_FORMAT",
            &format!(">c{head_bytes}{}", all(|member| member.numbers_format, "")),
        )
        .replace("VALUE_FORMAT", &format!(">c{head_bytes}{state_formats}"))
        .replace("WRITTEN_FORMAT", &format!(">c0{state_formats}"))
        .replace("CLOCK_JUMP", &CLOCK_JUMP.as_micros().to_string())
        .replace("VALUE_BYTES", &(head_bytes + state_bytes).to_string())
        .replace("NUMBERS", &all(|member| member.numbers, ", "))
        .replace("WRITTEN", &all(|member| member.written, ", "))
        .replace("STATES", &states)
        .replace("ZEROS", &zeros)
        .replace(
            "-- (the members come here)\n",
            &all(|member| member.code, ""),
        );
    expand_markers(&text)
}
