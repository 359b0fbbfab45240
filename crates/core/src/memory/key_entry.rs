//! A key's entry in the hash table: 48 bytes, with short keys and simple states stored inline.

use crate::{
    algorithm::{ExactMicros, IntervalState, KernelState, WindowState},
    eval::{ChargeRecord, KeyState, Limits, LoadedState},
    hash_table::{Distance, TableEntry, TableKey},
    time::Timestamp,
};

/// The parameters for loading a key's state.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoadContext {
    pub(super) now: Timestamp,
    /// The cost of the charge.
    pub(super) cost: u64,
    /// States written while the clock was ahead are clamped to this instant.
    pub(super) rewound: Timestamp,
}

/// A key and its state.
#[derive(Debug)]
pub(super) struct KeyEntry {
    key: TableKey,
    packed: PackedState,
    /// The fingerprint of the limits under which the state was written, plus the
    /// [`Self::UNCLAMPED`] bit.
    fingerprint: u32,
    /// Whether the key is hot: more than half of a limit is used, or the last request was denied. A
    /// hot key is not evicted.
    pub(super) is_hot: bool,
    distance: Distance,
}

const _: () = assert!(
    size_of::<Option<KeyEntry>>() == 48,
    "with a million keys, every byte counts"
);

impl KeyEntry {
    /// A bit that marks a state as possibly written while the clock was ahead. A marked state is
    /// clamped when it is next loaded: instants in its future are moved back.
    ///
    /// The bit is part of the fingerprint, above the 28 bits that identify limits, so the
    /// fingerprint of a marked state matches no limits. Every fast path compares fingerprints
    /// anyway, and needs no extra check for marked states.
    const UNCLAMPED: u32 = 1 << 31;

    pub(super) fn new(key: &[u8], key_state: KeyState, fingerprint: u32, is_hot: bool) -> Self {
        Self {
            key: TableKey::new(key),
            packed: PackedState::new(key_state),
            fingerprint,
            is_hot,
            distance: Distance::default(),
        }
    }

    #[inline]
    pub(super) fn key(&self) -> &[u8] {
        self.key.bytes()
    }

    pub(super) fn fingerprint(&self) -> u32 {
        self.fingerprint
    }

    /// Returns whether the state may have been written while the clock was ahead and is not clamped
    /// yet.
    pub(super) fn is_unclamped(&self) -> bool {
        self.fingerprint & Self::UNCLAMPED != 0
    }

    pub(super) fn mark_unclamped(&mut self) {
        self.fingerprint |= Self::UNCLAMPED;
    }

    /// Returns whether the state was written under limits with `fingerprint`. Ignores the
    /// [`Self::UNCLAMPED`] bit of the entry.
    pub(super) fn was_left_under(&self, fingerprint: u32) -> bool {
        self.fingerprint & !Self::UNCLAMPED == fingerprint
    }

    /// Returns whether the key must not be evicted: it is hot, or its state is checked out.
    pub(super) fn is_hot(&self) -> bool {
        self.is_hot || matches!(self.packed, PackedState::CheckedOut)
    }

    /// Takes the state out of the entry, converts it to `limits` and, if it is marked as unclamped,
    /// clamps it to `context.rewound`. Call [`Self::put`] before releasing the shard's lock.
    #[inline]
    pub(super) fn take(&mut self, limits: &Limits, context: LoadContext) -> LoadedState {
        let packed = std::mem::replace(&mut self.packed, PackedState::CheckedOut);
        self.load(packed, limits, context)
    }

    #[inline]
    fn load(&self, packed: PackedState, limits: &Limits, context: LoadContext) -> LoadedState {
        let Some(key_state) = packed.unpack() else {
            let key_state = limits.fresh();
            return LoadedState {
                key_state,
                former: None,
            };
        };
        if !self.is_unclamped() {
            return limits.load(key_state, self.fingerprint, context.now, context.cost);
        }
        let fingerprint = self.fingerprint & !Self::UNCLAMPED;
        let mut loaded = limits.load(key_state, fingerprint, context.now, context.cost);
        limits.clamp(&mut loaded.key_state, context.rewound);
        if let Some(former) = &mut loaded.former {
            // Keep the `UNCLAMPED` bit: if the former state is put back unchanged, a later load
            // must clamp the state. The drain times of the former state were computed before
            // clamping, so drop these times.
            former.fingerprint = self.fingerprint;
            former.drain_times.clear();
        }
        loaded
    }

    /// Takes the state out of the entry without converting or clamping it. Returns a fresh state of
    /// `limits` if the state is already checked out. Call [`Self::put`] before releasing the
    /// shard's lock.
    pub(super) fn take_as_left(&mut self, limits: &Limits) -> KeyState {
        let packed = std::mem::replace(&mut self.packed, PackedState::CheckedOut);
        packed.unpack().unwrap_or_else(|| limits.fresh())
    }

    /// Returns a copy of the state, converted and clamped as in [`Self::take`].
    pub(super) fn copy(&self, limits: &Limits, context: LoadContext) -> LoadedState {
        self.load(self.packed.clone(), limits, context)
    }

    /// Returns a copy of the state without converting or clamping it; `None` if the state is
    /// checked out.
    pub(super) fn key_state(&self) -> Option<KeyState> {
        self.packed.clone().unpack()
    }

    #[inline]
    pub(super) fn put(&mut self, key_state: KeyState, fingerprint: u32, is_hot: bool) {
        self.packed = PackedState::new(key_state);
        self.fingerprint = fingerprint;
        self.is_hot = is_hot;
    }

    /// Returns whether a decision in progress has checked out the state.
    #[cfg(test)]
    pub(super) fn is_checked_out(&self) -> bool {
        matches!(self.packed, PackedState::CheckedOut)
    }

    /// Returns whether a read-only decision can use the state itself instead of a copy: the
    /// decision charges the state and then undoes the charge. A copy of a large state would take
    /// long. A state written under other limits cannot be used without a copy, because the decision
    /// would convert or clamp the state.
    pub(super) fn can_be_lent(&self, limits: &Limits) -> bool {
        matches!(&self.packed, PackedState::Wide(key_state) if limits.can_undo(key_state))
            && self.fingerprint == limits.fingerprint()
    }

    /// Returns the state if it is a GCRA state written under limits with `fingerprint`.
    #[inline]
    pub(super) fn gcra(&self, fingerprint: u32) -> Option<ExactMicros> {
        match self.packed {
            PackedState::Gcra { part, whole } if self.fingerprint == fingerprint => {
                Some(ExactMicros {
                    part: u64::from(part),
                    whole,
                })
            }
            _ => None,
        }
    }

    /// Replaces a GCRA state returned by [`Self::gcra`]. `tat` must be computed under the same
    /// limits as the old state. All fractions of the limits must fit in 32 bits.
    #[inline]
    pub(super) fn put_gcra(&mut self, tat: ExactMicros, is_hot: bool) {
        // Skip the write if nothing changes: all cores can share a cache line that is only read.
        if self.gcra(self.fingerprint) != Some(tat)
            && let Some(packed) = PackedState::gcra(tat)
        {
            self.packed = packed;
        }
        if self.is_hot != is_hot {
            self.is_hot = is_hot;
        }
    }

    /// Returns when the key expires. After the expiry, the key can be dropped without changing any
    /// decision.
    pub(super) fn expires(&self) -> Timestamp {
        match &self.packed {
            PackedState::Gcra { part, whole } => ExactMicros {
                part: u64::from(*part),
                whole: *whole,
            }
            .ceil(),
            PackedState::Interval { full_at, .. } => Timestamp::from_micros(*full_at),
            PackedState::Window { end, .. } => Timestamp::from_micros(*end),
            PackedState::Wide(key_state) => key_state.expires(),
            PackedState::CheckedOut => Timestamp::MAX,
        }
    }

    /// Returns the instant at which the last spent unit expires. Concurrency slots are not units.
    pub(super) fn units_expire(&self) -> Timestamp {
        match &self.packed {
            PackedState::Wide(key_state) => key_state.units_expire(),
            _ => self.expires(),
        }
    }

    /// Returns the heap size of this key and its state, in bytes.
    #[inline]
    pub(super) fn heap_bytes(&self) -> usize {
        self.key.heap_bytes()
            + if let PackedState::Wide(key_state) = &self.packed {
                key_state.boxed_bytes()
            } else {
                0
            }
    }

    /// Returns whether all concurrency slots of `charged` are still held and their leases can be
    /// renewed without additional memory.
    pub(super) fn renews_in_place(&self, charged: &ChargeRecord) -> bool {
        matches!(&self.packed, PackedState::Wide(key_state) if key_state.renews_in_place(charged))
    }

    /// Returns the maximum number of heap bytes that a charge of `cost` to `limits` adds to this
    /// entry.
    #[inline]
    pub(super) fn growth_bytes(&self, limits: &Limits, cost: u64) -> usize {
        match &self.packed {
            PackedState::Wide(key_state) => limits.growth_bytes(key_state, self.fingerprint, cost),
            _ => limits.new_entry_bytes(cost),
        }
    }
}

impl TableEntry for KeyEntry {
    #[inline]
    fn is_of(&self, key: &[u8]) -> bool {
        self.key.is(key)
    }

    fn distance(&self) -> Distance {
        self.distance
    }

    fn set_distance(&mut self, distance: Distance) {
        self.distance = distance;
    }
}

/// A [`KeyState`] in 16 bytes. A simple state is stored inline if its counts and fractions fit in
/// 32 bits; all other states are boxed.
#[derive(Clone, Debug)]
enum PackedState {
    Gcra {
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
    Wide(Box<KeyState>),
    /// A decision in progress has checked out the state.
    CheckedOut,
}

impl PackedState {
    #[inline]
    fn new(key_state: KeyState) -> Self {
        match &key_state {
            KeyState::One(KernelState::Gcra(tat)) => Self::gcra(*tat),
            KeyState::One(KernelState::Interval(IntervalState { last, full_at })) => {
                u32::try_from(*last).ok().map(|last| Self::Interval {
                    last,
                    full_at: *full_at,
                })
            }
            KeyState::One(KernelState::Window(WindowState { count, end })) => u32::try_from(*count)
                .ok()
                .map(|count| Self::Window { count, end: *end }),
            _ => None,
        }
        .unwrap_or_else(|| Self::Wide(Box::new(key_state)))
    }

    #[inline]
    fn gcra(tat: ExactMicros) -> Option<Self> {
        let part = u32::try_from(tat.part).ok()?;
        Some(Self::Gcra {
            part,
            whole: tat.whole,
        })
    }

    #[inline]
    fn unpack(self) -> Option<KeyState> {
        Some(KeyState::One(match self {
            Self::Gcra { part, whole } => KernelState::Gcra(ExactMicros {
                part: u64::from(part),
                whole,
            }),
            Self::Interval { last, full_at } => KernelState::Interval(IntervalState {
                last: u64::from(last),
                full_at,
            }),
            Self::Window { count, end } => KernelState::Window(WindowState {
                count: u64::from(count),
                end,
            }),
            Self::Wide(key_state) => return Some(*key_state),
            Self::CheckedOut => return None,
        }))
    }
}
