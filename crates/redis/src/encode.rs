//! What is sent: the numbers of a charge's limits as a program for the script, and states as values.
//!
//! A value is binary. Numbers are big-endian; an instant or a count takes 7 bytes.
//!
//! ```text
//!   | head: 4 bytes | [how many states: 1 byte] | [kind: 1 byte] state | [kind] state | …
//!
//!   head    1 bit   blocked: the end of the block follows, 7 bytes, 0 for none, then the rest as it was
//!           3 bits  the kernel, where there is only one; 7 where there are several, and the bytes in brackets
//!           28 bits of the fingerprint of the limits that left it
//!   kind    5 bits  bytes of a schedule's fraction;  3 bits  the kernel
//! ```
//!
//! One schedule whose unit is a whole number of microseconds is therefore 11 bytes, the most that Redis keeps in
//! its smallest allocation for strings.

use tidegate_core::{
    Charge, Span, Timestamp, Window,
    remote::{self, Denials, Held, Member, Numbers},
};

/// The first four bytes of a value.
pub(crate) type Head = [u8; 4];

/// The kernel in a head when there are several.
pub(crate) const SEVERAL: u8 = 7;

/// Set in the first byte of a value under a block.
pub(crate) const BLOCKED: u8 = 0x80;

/// The bits of a kind that name the kernel.
pub(crate) const KERNEL_BITS: u32 = 3;

/// How many windows of a calendar a program names, from the one of the latest instant known: the server's clock may
/// have gone on.
const CALENDAR_WINDOWS: usize = 3;

/// The kernels by the numbers that the scripts know them by.
pub(crate) mod kernel {
    pub(crate) const SCHEDULE: u8 = 0;
    pub(crate) const INTERVAL: u8 = 1;
    pub(crate) const WINDOW: u8 = 2;
    pub(crate) const LOG: u8 = 3;
    pub(crate) const BUCKETS: u8 = 4;
    pub(crate) const WEIGHTED: u8 = 5;
    pub(crate) const LEASE: u8 = 6;
}

/// The head of the values that the limits of `charge` leave.
pub(crate) fn head(charge: &Charge<'_>) -> Head {
    let mut members = remote::numbers(charge.limits, charge.cost);
    let shape = match (members.next(), members.next()) {
        (Some(member), None) => number_of(&member.numbers),
        _ => SEVERAL,
    };
    let fingerprint = remote::fingerprint(charge.limits) & 0x0FFF_FFFF;
    (u32::from(shape) << 28 | fingerprint).to_be_bytes()
}

/// The program of `charge` for the script `check`, which says what is in it; `around` is the latest instant known.
pub(crate) fn program(charge: &Charge<'_>, around: Timestamp) -> Vec<u8> {
    let members = remote::numbers(charge.limits, charge.cost);
    let several = members.len() > 1;
    let mut pack = Pack::default();
    pack.array(4 + members.len());
    pack.bytes(&head(charge));
    match u8::try_from(members.len()) {
        Ok(count) if several => pack.bytes(&[count]),
        _ => pack.bytes(&[]),
    }
    pack.boolean(charge.limits.shadow());
    pack.boolean(counts_denials(charge));
    for member in members {
        put_member(&mut pack, &member, several, charge, around);
    }
    pack.0
}

/// Whether anything of `charge` counts what is denied.
pub(crate) fn counts_denials(charge: &Charge<'_>) -> bool {
    remote::numbers(charge.limits, charge.cost).any(|member| member.denials != Denials::Forgotten)
}

/// The value of a key with these states, one a kernel of `charge`, under no block.
pub(crate) fn value(charge: &Charge<'_>, held: &[Held]) -> Vec<u8> {
    let mut value = head(charge).to_vec();
    let several = held.len() > 1;
    if several {
        put(&mut value, held.len() as u64, 1);
    }
    for (member, held) in remote::numbers(charge.limits, charge.cost).zip(held) {
        if several {
            value.push(fraction_bytes(&member.numbers) << KERNEL_BITS | number_of(&member.numbers));
        }
        put_state(&mut value, &member.numbers, held);
    }
    value
}

/// A value under a block: `state` is the value as it would be without it, empty where nothing is spent.
pub(crate) fn blocked(until: Option<Timestamp>, state: &[u8]) -> Vec<u8> {
    let (head, rest) = state.split_first_chunk().unwrap_or((&[0; 4], &[]));
    let mut value: Vec<u8> = head.to_vec();
    value[0] |= BLOCKED;
    put(&mut value, until.map_or(0, Timestamp::as_micros), 7);
    value.extend_from_slice(rest);
    value
}

/// A state, as the file of its kernel describes it.
fn put_state(value: &mut Vec<u8>, numbers: &Numbers<'_>, held: &Held) {
    let mut wide = |numbers: &[u64]| numbers.iter().for_each(|number| put(value, *number, 7));
    match held {
        Held::Schedule(arrival) => {
            wide(&[arrival.whole]);
            put(value, arrival.part, usize::from(fraction_bytes(numbers)));
        }
        Held::Interval { full_at, last } => wide(&[*full_at, *last]),
        Held::Window { count, end } => wide(&[*count, *end]),
        Held::Weighted {
            index,
            previous,
            current,
            window,
        } => wide(&[*index, *previous, *current, *window]),
        Held::Buckets {
            newest,
            width,
            counts,
        } => {
            wide(&[*newest, *width, counts.iter().sum()]);
            put(value, counts.len() as u64, 2);
            counts.iter().for_each(|count| put(value, *count, 7));
        }
        Held::Log { longest, stamps } | Held::Lease { longest, stamps } => {
            let windows = match numbers {
                Numbers::Log { windows } => windows.len(),
                Numbers::Lease { .. } => 1,
                _ => 0,
            };
            wide(&[*longest]);
            put(value, stamps.len() as u64, 4);
            put(value, windows as u64, 1);
            put(value, 0, 3);
            // Every window begins with the first entry; the script finds out where it does now.
            let first = stamps.first().map_or(0, |(at, _)| *at);
            for _ in 0..windows {
                put(value, 0, 4 + 3);
                put(value, first, 7);
            }
            let mut sum = 0;
            for (at, cost) in stamps {
                sum += cost;
                put(value, *at, 7);
                put(value, sum, 3);
            }
        }
        _ => unreachable!("core has no other state"),
    }
}

/// The lowest `bytes` bytes of a number, at most 8.
fn put(value: &mut Vec<u8>, number: u64, bytes: usize) {
    value.extend_from_slice(&number.to_be_bytes()[8 - bytes.min(8)..]);
}

/// The kernels that decide `charge`, each with its bit, by the numbers of [`kernel`].
pub(crate) fn kernels(charge: &Charge<'_>) -> u8 {
    let members = remote::numbers(charge.limits, charge.cost);
    members.fold(0, |bits, member| match number_of(&member.numbers) {
        kernel::LEASE => bits | 1 << kernel::LEASE | 1 << kernel::LOG,
        number => bits | 1 << number,
    })
}

fn number_of(numbers: &Numbers<'_>) -> u8 {
    match numbers {
        Numbers::Schedule { .. } => kernel::SCHEDULE,
        Numbers::Interval { .. } => kernel::INTERVAL,
        Numbers::Window { .. } => kernel::WINDOW,
        Numbers::Log { .. } => kernel::LOG,
        Numbers::Buckets { .. } => kernel::BUCKETS,
        Numbers::Weighted { .. } => kernel::WEIGHTED,
        Numbers::Lease { .. } => kernel::LEASE,
        _ => unreachable!("core has no other kernel"),
    }
}

/// A member as `check.lua` and the file of its kernel describe it.
fn put_member(
    pack: &mut Pack,
    member: &Member<'_>,
    several: bool,
    charge: &Charge<'_>,
    around: Timestamp,
) {
    let cost = charge.cost.units();
    let begin = |pack: &mut Pack, numbers| begin_member(pack, member, several, numbers);
    match &member.numbers {
        Numbers::Schedule {
            fraction,
            lasting,
            tau,
            queue,
        } => {
            let longest = longest_wait(charge, *queue);
            begin(pack, 8 + usize::from(longest.is_some()));
            pack.number(*fraction);
            pack.boolean(lasting.is_some());
            // What never fits fills the bucket to the brim where it counts.
            for exact in [lasting.unwrap_or(*tau), *tau] {
                pack.numbers(&[exact.whole, exact.part]);
            }
            pack.bytes(format!(">I7I{}", fraction_bytes(&member.numbers)).as_bytes());
            pack.boolean(*queue);
            pack.numbers(longest.as_slice());
        }
        Numbers::Interval {
            refill,
            every,
            capacity,
        } => {
            begin(pack, 5);
            pack.numbers(&[*refill, *every, *capacity, cost]);
            pack.boolean(cost <= *capacity);
        }
        Numbers::Window { limit, most, grid } => {
            let grid = grid_numbers(grid, around);
            begin(pack, 4 + grid.len());
            pack.numbers(&[*limit, cost]);
            pack.boolean(cost <= *limit);
            pack.number(*most);
            pack.numbers(&grid);
        }
        Numbers::Weighted { limit, window } => {
            begin(pack, 4);
            pack.numbers(&[*limit, *window, cost]);
            pack.boolean(cost <= *limit);
        }
        Numbers::Buckets {
            limit,
            width,
            summed,
        } => {
            begin(pack, 5);
            pack.numbers(&[*limit, *width, *summed as u64, cost]);
            pack.boolean(cost <= *limit);
        }
        Numbers::Log { windows } => {
            begin(pack, 2 + 2 * windows.len());
            put_windows(pack, windows, cost);
        }
        Numbers::Lease { limit, lease } => {
            begin(pack, 4);
            put_windows(pack, &[(*limit, *lease)], cost);
        }
        _ => unreachable!("core has no other kernel"),
    }
}

/// For how long whoever asks would wait in a queue, in microseconds.
fn longest_wait(charge: &Charge<'_>, queue: bool) -> Option<u64> {
    let longest = charge.longest_wait.filter(|_| queue)?;
    // Nobody waits for longer than an instant can be away, and Lua's numbers end there.
    Some(longest.as_micros().min(Timestamp::MAX.as_micros()))
}

/// What every member begins with, before so many numbers of its kernel.
fn begin_member(pack: &mut Pack, member: &Member<'_>, several: bool, numbers: usize) {
    let number = number_of(&member.numbers);
    pack.array(3 + numbers);
    pack.number(number.into());
    pack.number(match member.denials {
        Denials::Forgotten => 0,
        Denials::Counted => 1,
        Denials::InFull => 2,
    });
    let kind = [fraction_bytes(&member.numbers) << KERNEL_BITS | number];
    pack.bytes(if several { &kind } else { &[] });
}

/// The windows of a log.
fn put_windows(pack: &mut Pack, windows: &[(u64, Span)], cost: u64) {
    let largest = windows.iter().map(|(limit, _)| *limit).max();
    pack.numbers(&[largest.unwrap_or(0), cost]);
    for (limit, span) in windows {
        pack.numbers(&[*limit, span.as_micros()]);
    }
}

/// The grid's number, and its numbers.
fn grid_numbers(grid: &Window, around: Timestamp) -> Vec<u64> {
    match grid {
        Window::Epoch(span) => vec![0, span.as_micros()],
        Window::FirstRequest(span) => vec![1, span.as_micros()],
        Window::Calendar(calendar) => {
            let (start, mut end) = calendar.window(around);
            let mut numbers = vec![2, start.as_micros()];
            for _ in 0..CALENDAR_WINDOWS {
                numbers.push(end.as_micros());
                end = calendar.window(end).1;
            }
            numbers
        }
    }
}

/// How many bytes hold the fraction of a schedule.
fn fraction_bytes(numbers: &Numbers<'_>) -> u8 {
    let Numbers::Schedule { fraction, .. } = numbers else {
        return 0;
    };
    // At most the eight bytes of a number.
    let bits = u64::BITS - (fraction - 1).leading_zeros();
    u8::try_from(bits.div_ceil(8)).unwrap_or(8)
}

/// MessagePack, as much as programs need.
#[derive(Default)]
struct Pack(Vec<u8>);

impl Pack {
    fn array(&mut self, len: usize) {
        // A program has at most some dozens of parts.
        let len = u16::try_from(len).unwrap_or(u16::MAX);
        match u8::try_from(len) {
            Ok(len) if len < 16 => self.0.push(0x90 | len),
            _ => {
                self.0.push(0xDC);
                self.0.extend(len.to_be_bytes());
            }
        }
    }

    fn number(&mut self, number: u64) {
        match (u8::try_from(number), u32::try_from(number)) {
            (Ok(small), _) if small < 128 => self.0.push(small),
            (_, Ok(middle)) => {
                self.0.push(0xCE);
                self.0.extend(middle.to_be_bytes());
            }
            _ => {
                self.0.push(0xCF);
                self.0.extend(number.to_be_bytes());
            }
        }
    }

    fn numbers(&mut self, numbers: &[u64]) {
        numbers.iter().for_each(|number| self.number(*number));
    }

    fn boolean(&mut self, boolean: bool) {
        self.0.push(if boolean { 0xC3 } else { 0xC2 });
    }

    /// At most 31 bytes.
    fn bytes(&mut self, bytes: &[u8]) {
        debug_assert!(bytes.len() < 32, "only heads, kinds and formats");
        self.0
            .push(0xA0 | u8::try_from(bytes.len() & 31).unwrap_or(0));
        self.0.extend_from_slice(bytes);
    }
}
