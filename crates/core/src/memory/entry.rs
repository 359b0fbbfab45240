//! What the store keeps of one key: 48 bytes, with short keys and plain states inside.

use crate::{
    cell::Cell,
    kernel::{Exact, IntervalState, State, WindowState},
    limits::{Limits, Loaded},
    memory::table,
    receipt::Charged,
    time::Timestamp,
};

/// The instants by which a shard loads a state.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    pub(super) now: Timestamp,
    /// The instant to which states are clamped that were left while the clock was ahead.
    pub(super) rewound: Timestamp,
}

/// One key and what is remembered of it.
#[derive(Debug)]
pub(super) struct Entry {
    key: Key,
    packed: Packed,
    /// Of the limits under which the state was left, and [`Self::UNCLAMPED`] on top.
    fingerprint: u32,
    /// Whether half of a limit is spent, or the key was denied: such a key is not forgotten to make room.
    pub(super) pressed: bool,
    /// How many slots the table has put it behind its home, in three bytes. It fits: fewer than there are
    /// entries, of which a table holds at most [`table::MAX_ENTRIES`], 2^24.
    distance: [u8; 3],
}

const _: () = assert!(
    size_of::<Option<Entry>>() == 48,
    "a million keys are paid for by the byte"
);

impl Entry {
    /// Marks a state that may have been left while the clock was ahead, and is clamped when it is next loaded.
    ///
    /// It is a bit of the fingerprint, above the 28 that limits use, so that such a state is not that of any
    /// limits: every short cut compares fingerprints, and none has to look for the mark.
    const UNCLAMPED: u32 = 1 << 31;

    pub(super) fn new(key: &[u8], cell: Cell, fingerprint: u32, pressed: bool) -> Self {
        Self {
            key: Key::new(key),
            packed: Packed::new(cell),
            fingerprint,
            pressed,
            distance: [0; 3],
        }
    }

    /// How many slots the table has put it behind its home.
    pub(super) fn distance(&self) -> usize {
        let [low, middle, high] = self.distance;
        // Three bytes fit a usize.
        u32::from_le_bytes([low, middle, high, 0]) as usize
    }

    pub(super) fn set_distance(&mut self, distance: usize) {
        debug_assert!(distance < table::MAX_ENTRIES, "as many entries lie between");
        let [low, middle, high, ..] = distance.to_le_bytes();
        self.distance = [low, middle, high];
    }

    #[inline]
    pub(super) fn key(&self) -> &[u8] {
        self.key.bytes()
    }

    /// Whether it is the entry of `key`.
    #[inline]
    pub(super) fn is_of(&self, key: &[u8]) -> bool {
        match &self.key {
            Key::Inline { len, bytes } => usize::from(*len) == key.len() && begins_with(bytes, key),
            Key::Heap(bytes) => is_equal(bytes, key),
        }
    }

    pub(super) fn fingerprint(&self) -> u32 {
        self.fingerprint
    }

    /// Whether the state may have been left while the clock was ahead.
    pub(super) fn is_unclamped(&self) -> bool {
        self.fingerprint & Self::UNCLAMPED != 0
    }

    pub(super) fn mark_unclamped(&mut self) {
        self.fingerprint |= Self::UNCLAMPED;
    }

    /// Whether the state was left under limits of `fingerprint`, clamped or not.
    pub(super) fn was_left_under(&self, fingerprint: u32) -> bool {
        self.fingerprint & !Self::UNCLAMPED == fingerprint
    }

    /// Whether the key may be forgotten to make room for another.
    pub(super) fn pressed(&self) -> bool {
        self.pressed || matches!(self.packed, Packed::Taken)
    }

    /// Takes the state out, as one that `limits` can evaluate. [`Self::put`] must follow under the
    /// same lock. An unclamped state is clamped to `clock.rewound`.
    #[inline]
    pub(super) fn take(&mut self, limits: &Limits, clock: Clock) -> Loaded {
        let packed = std::mem::replace(&mut self.packed, Packed::Taken);
        self.load(packed, limits, clock)
    }

    #[inline]
    fn load(&self, packed: Packed, limits: &Limits, clock: Clock) -> Loaded {
        let Some(cell) = packed.unpack() else {
            let cell = limits.fresh();
            return Loaded { cell, left: None };
        };
        if !self.is_unclamped() {
            return limits.load(cell, self.fingerprint, clock.now);
        }
        let fingerprint = self.fingerprint & !Self::UNCLAMPED;
        let mut loaded = limits.load(cell, fingerprint, clock.now);
        limits.clamp(&mut loaded.cell, clock.rewound);
        if let Some(left) = &mut loaded.left {
            // Whoever puts it back as it was left must clamp it later.
            left.fingerprint = self.fingerprint;
        }
        loaded
    }

    /// Takes the state out as it was left; a fresh one of `limits` if it is out. [`Self::put`] must follow under the same lock.
    pub(super) fn take_as_left(&mut self, limits: &Limits) -> Cell {
        let packed = std::mem::replace(&mut self.packed, Packed::Taken);
        packed.unpack().unwrap_or_else(|| limits.fresh())
    }

    /// A copy of the state, as one that `limits` know, clamped as by [`Self::take`].
    pub(super) fn copy(&self, limits: &Limits, clock: Clock) -> Loaded {
        self.load(self.packed.clone(), limits, clock)
    }

    /// A copy of the state as it was left.
    pub(super) fn cell(&self) -> Option<Cell> {
        self.packed.clone().unpack()
    }

    #[inline]
    pub(super) fn put(&mut self, cell: Cell, fingerprint: u32, pressed: bool) {
        self.packed = Packed::new(cell);
        self.fingerprint = fingerprint;
        self.pressed = pressed;
    }

    /// Whether the state is out, because a decision is being made on it.
    #[cfg(test)]
    pub(super) fn is_taken(&self) -> bool {
        matches!(self.packed, Packed::Taken)
    }

    /// Whether a decision that changes nothing can work on the state itself, and put it back as it was, because
    /// a copy may be large: `limits` left it, and need not convert or clamp it first.
    pub(super) fn can_be_lent(&self, limits: &Limits) -> bool {
        matches!(&self.packed, Packed::Wide(cell) if limits.can_undo(cell))
            && self.fingerprint == limits.fingerprint()
    }

    /// The state, if it is a plain schedule that was left under limits of `fingerprint`.
    #[inline]
    pub(super) fn schedule(&self, fingerprint: u32) -> Option<Exact> {
        match self.packed {
            Packed::Schedule { part, whole } if self.fingerprint == fingerprint => Some(Exact {
                part: u64::from(part),
                whole,
            }),
            _ => None,
        }
    }

    /// Leaves a schedule's state where [`Self::schedule`] found one of the same limits, all of whose fractions fit.
    #[inline]
    pub(super) fn put_schedule(&mut self, tat: Exact, pressed: bool) {
        // What is as it was is not written: a line that is only read can lie in the caches of all cores.
        if self.schedule(self.fingerprint) != Some(tat)
            && let Some(packed) = Packed::schedule(tat)
        {
            self.packed = packed;
        }
        if self.pressed != pressed {
            self.pressed = pressed;
        }
    }

    /// The instant from which forgetting the key changes nothing.
    pub(super) fn expires(&self) -> Timestamp {
        match &self.packed {
            Packed::Schedule { part, whole } => Exact {
                part: u64::from(*part),
                whole: *whole,
            }
            .ceil(),
            Packed::Interval { full_at, .. } => Timestamp::from_micros(*full_at),
            Packed::Window { end, .. } => Timestamp::from_micros(*end),
            Packed::Wide(cell) => cell.expires(),
            Packed::Taken => Timestamp::MAX,
        }
    }

    /// Bytes on the heap that belong to this key.
    #[inline]
    pub(super) fn heap_bytes(&self) -> usize {
        self.key.heap_bytes()
            + if let Packed::Wide(cell) = &self.packed {
                cell.boxed_bytes()
            } else {
                0
            }
    }

    /// Whether all places of `charged` are held, and held from another instant on they take no more bytes.
    pub(super) fn renews_in_place(&self, charged: &Charged) -> bool {
        matches!(&self.packed, Packed::Wide(cell) if cell.renews_in_place(charged))
    }

    /// The most bytes that charging `cost` to `limits` adds.
    #[inline]
    pub(super) fn growth_bytes(&self, limits: &Limits, cost: u64) -> usize {
        match &self.packed {
            Packed::Wide(cell) => limits.growth_bytes(cell, self.fingerprint, cost),
            _ => limits.newcomer_bytes(cost),
        }
    }
}

/// Whether the bytes of a key inside an entry begin with those of `key`, which is no longer than they are.
#[inline]
fn begins_with(bytes: &[u8; Key::INLINE], key: &[u8]) -> bool {
    // Two halves that overlap are compared in less time than it takes to call a function that compares bytes.
    match (key.first_chunk::<8>(), key.last_chunk::<8>()) {
        (Some(first), Some(last)) if key.len() <= 16 => {
            let at = key.len() - last.len();
            bytes[..8] == *first && bytes[at..at + 8] == *last
        }
        _ => is_equal(&bytes[..key.len()], key),
    }
}

// A call where it is needed keeps the comparison of short keys small.
#[inline(never)]
fn is_equal(own: &[u8], key: &[u8]) -> bool {
    own == key
}

/// Bytes on the heap that a key takes.
pub(super) fn key_bytes(key: &[u8]) -> usize {
    if key.len() <= Key::INLINE {
        0
    } else {
        key.len()
    }
}

/// A key of up to 22 bytes lies inside the entry.
#[derive(Debug)]
enum Key {
    Inline { len: u8, bytes: [u8; Self::INLINE] },
    Heap(Box<[u8]>),
}

impl Key {
    const INLINE: usize = 22;

    fn new(key: &[u8]) -> Self {
        match u8::try_from(key.len()) {
            Ok(len) if key.len() <= Self::INLINE => {
                let mut bytes = [0; Self::INLINE];
                bytes[..key.len()].copy_from_slice(key);
                Self::Inline { len, bytes }
            }
            _ => Self::Heap(key.into()),
        }
    }

    #[inline]
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Inline { len, bytes } => &bytes[..usize::from(*len)],
            Self::Heap(bytes) => bytes,
        }
    }

    fn heap_bytes(&self) -> usize {
        if let Self::Heap(bytes) = self {
            bytes.len()
        } else {
            0
        }
    }
}

/// A cell in 16 bytes: the plain states inside, with counts and fractions of up to 32 bits; all else in a box.
#[derive(Clone, Debug)]
enum Packed {
    Schedule {
        part: u32,
        whole: u64,
    },
    Interval {
        last: u32,
        full_at: u64,
    },
    Window {
        count: u32,
        end: u64,
    },
    Wide(Box<Cell>),
    /// Out of the entry while a decision is being made.
    Taken,
}

impl Packed {
    #[inline]
    fn new(cell: Cell) -> Self {
        match &cell {
            Cell::One(State::Schedule(tat)) => Self::schedule(*tat),
            Cell::One(State::Interval(IntervalState { last, full_at })) => {
                u32::try_from(*last).ok().map(|last| Self::Interval {
                    last,
                    full_at: *full_at,
                })
            }
            Cell::One(State::Window(WindowState { count, end })) => u32::try_from(*count)
                .ok()
                .map(|count| Self::Window { count, end: *end }),
            _ => None,
        }
        .unwrap_or_else(|| Self::Wide(Box::new(cell)))
    }

    #[inline]
    fn schedule(tat: Exact) -> Option<Self> {
        let part = u32::try_from(tat.part).ok()?;
        Some(Self::Schedule {
            part,
            whole: tat.whole,
        })
    }

    #[inline]
    fn unpack(self) -> Option<Cell> {
        Some(Cell::One(match self {
            Self::Schedule { part, whole } => State::Schedule(Exact {
                part: u64::from(part),
                whole,
            }),
            Self::Interval { last, full_at } => State::Interval(IntervalState {
                last: u64::from(last),
                full_at,
            }),
            Self::Window { count, end } => State::Window(WindowState {
                count: u64::from(count),
                end,
            }),
            Self::Wide(cell) => return Some(*cell),
            Self::Taken => return None,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Exact;

    fn entry(key: &[u8]) -> Entry {
        let cell = Cell::One(State::Schedule(Exact::default()));
        Entry::new(key, cell, 0, false)
    }

    #[test]
    fn an_entry_is_of_its_own_key_and_of_no_other() {
        for length in 1..=24 {
            let key: Vec<u8> = (1..=length).collect();
            let entry = entry(&key);
            assert!(entry.is_of(&key), "{length} bytes");
            assert!(!entry.is_of(&key[1..]) && !entry.is_of(&key[..key.len() - 1]));
            assert!(!entry.is_of(&[&key[..], &[0]].concat()));
            for at in 0..key.len() {
                let mut other = key.clone();
                other[at] ^= 0x80;
                assert!(!entry.is_of(&other), "byte {at} of {length}");
            }
        }
    }
}
