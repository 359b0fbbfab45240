//! Assembles `fast_path.lua` for a sequence of kernels.

use std::sync::OnceLock;

use super::expand_markers;
use crate::{call::Script, encode::kernel};

/// Most members that a script of the fast path has. The number of scripts grows as a power of it.
pub(crate) const MAX_MEMBERS: usize = 4;

/// A kernel on the fast path. In its names and its code, N stands for the number of the member.
struct FastKernel {
    /// The number of the kernel.
    kernel: u8,
    /// Length in bytes of the kernel and its parameters in the header of a value.
    head_bytes: usize,
    /// The numbers of a member, and their `struct` format.
    numbers: (&'static str, &'static str),
    /// The state, its format, and its length in bytes.
    state: (&'static str, &'static str, usize),
    /// The numbers that are written as the state.
    written: &'static str,
    code: &'static str,
}

const FAST_KERNELS: [FastKernel; 4] = [
    FastKernel {
        kernel: kernel::SCHEDULE,
        head_bytes: 4,
        numbers: ("duration_N, tau_N, lead_N", "I7I7I1"),
        state: ("arrival_N, found_lead_N", "I7I1", 8),
        written: "arrival_N, lead_N",
        code: include_str!("fast_path/schedule.lua"),
    },
    FastKernel {
        kernel: kernel::INTERVAL,
        head_bytes: 9,
        numbers: (
            "refill_N, every_N, capacity_N, cost_N, lead_N",
            "I7I7I7I7I1",
        ),
        state: ("full_at_N, last_N, found_lead_N", "I7I7I1", 15),
        written: "full_at_N, last_N, lead_N",
        code: include_str!("fast_path/interval.lua"),
    },
    FastKernel {
        kernel: kernel::WINDOW,
        head_bytes: 5,
        numbers: ("limit_N, cost_N, is_epoch_N, span_N", "I7I7I1I7"),
        state: ("count_N, ends_N", "I7I7", 14),
        written: "count_N, ends_N",
        code: include_str!("fast_path/window.lua"),
    },
    FastKernel {
        kernel: kernel::WEIGHTED,
        head_bytes: 5,
        numbers: ("limit_N, window_N, cost_N", "I7I7I7"),
        state: (
            "index_N, previous_N, current_N, found_window_N",
            "I7I7I7I7",
            28,
        ),
        written: "index_N, previous_N, current_N, window_N",
        code: include_str!("fast_path/weighted.lua"),
    },
];

/// Returns the script that decides one key with members of these kernels, and the length of the
/// header that it expects in a value. Returns `None` if there is no such script.
pub(crate) fn fast_path(kernels: &[u8]) -> Option<(&'static Script, usize)> {
    // The kernels are the digits of the index; 0 stands for no further member.
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

/// Returns the text of the script for these members.
fn assemble(members: &[&FastKernel], head_bytes: usize) -> String {
    let numbered = |text: &str, number: usize| text.replace("_N", &format!("_{number}"));
    let all = |part: fn(&FastKernel) -> &'static str, separator: &str| {
        let parts: Vec<String> = (1..)
            .zip(members)
            .map(|(number, member)| numbered(part(member), number))
            .collect();
        parts.join(separator)
    };
    let states = all(|member| member.state.0, ", ");
    let state_formats = all(|member| member.state.1, "");
    let state_bytes: usize = members.iter().map(|member| member.state.2).sum();
    let zeros = vec!["0"; states.split(", ").count()].join(", ");
    let text = include_str!("fast_path.lua")
        .replace(
            "NUMBERS_FORMAT",
            &format!(">c{head_bytes}{}", all(|member| member.numbers.1, "")),
        )
        .replace("VALUE_FORMAT", &format!(">c{head_bytes}{state_formats}"))
        .replace("WRITTEN_FORMAT", &format!(">c0{state_formats}"))
        .replace("VALUE_BYTES", &(head_bytes + state_bytes).to_string())
        .replace("NUMBERS", &all(|member| member.numbers.0, ", "))
        .replace("WRITTEN", &all(|member| member.written, ", "))
        .replace("STATES", &states)
        .replace("ZEROS", &zeros)
        .replace(
            "-- (the members come here)\n",
            &all(|member| member.code, ""),
        );
    expand_markers(&text)
}
