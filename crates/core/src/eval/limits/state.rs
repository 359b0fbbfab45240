//! Operations of a rule's limits on a key's state. A key's state consists of one state for each
//! limit, except that sliding window logs share one state.

use smallvec::SmallVec;

use super::Limits;
use crate::{
    algorithm::{
        ChargePosition, Drain, Kernel, KernelState, LogState, Mark, Outcome, Stamp, Terms,
    },
    eval::{
        ChargeRecord, DenialCounting, EvaluationResult, KeyState, LimitGroup, Marks, Mask,
        Settlement,
    },
    time::{Span, Timestamp},
};

/// The information needed to undo a charge on one state.
#[derive(Debug)]
pub(crate) enum UndoRecord {
    /// A copy of the state.
    State(KernelState),
    /// The former capacity of a sliding window log. The log itself is not copied, because the
    /// charge can be removed from it.
    LogOfCapacity(usize),
}

/// A key's state that is ready for evaluation.
#[derive(Debug)]
pub(crate) struct LoadedState {
    pub(crate) key_state: KeyState,
    /// The state before its conversion, if the conversion did not keep all spent units.
    pub(crate) former: Option<Box<FormerState>>,
}

/// A key's state that was written under other limits, and that cannot be converted to the current
/// limits without losing spent units.
///
/// If a decision writes nothing, the former state is restored, because its limits may be configured
/// again later or may still be in use on another server.
#[derive(Debug)]
pub(crate) struct FormerState {
    pub(crate) key_state: KeyState,
    /// The fingerprint of the limits under which the state was written.
    pub(crate) fingerprint: u32,
    /// The drain times of the state, if the state exceeds a limit.
    pub(crate) drain_times: DrainTimes,
    /// Whether the conversion lost all spent units.
    pub(crate) is_lost: bool,
}

impl FormerState {
    /// Returns this former state if it must be put back after a refund. The refund is applied to
    /// the converted state, which normally replaces the former state. If the conversion lost
    /// everything that could be refunded, the store keeps the former state.
    pub(crate) fn after_refund(mut self: Box<Self>) -> Option<Box<Self>> {
        self.drain_times.clear();
        self.is_lost.then_some(self)
    }
}

/// The times until a key's state has drained, if the state exceeds a limit because it was written
/// under limits with a larger capacity or a faster rate. A conversion would lose the excess, so the
/// state keeps its former terms until it exceeds no limit. The list contains every limit whose
/// state keeps its former terms. The list is empty if the state exceeds no limit.
#[derive(Clone, Debug, Default)]
pub struct DrainTimes(Vec<LimitDrain>);

#[derive(Clone, Copy, Debug)]
struct LimitDrain {
    /// The index of the limit in the rule.
    limit: usize,
    drain: Drain,
}

impl DrainTimes {
    /// Returns whether the state exceeds no limit.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Removes all limits, so that [`Self::correct`] changes nothing.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Corrects the times in `outcomes`, which were computed from the converted state. `outcomes`
    /// contains the outcomes of all limits of the rule.
    pub fn correct(&self, outcomes: &mut [Outcome]) {
        for drain in &self.0 {
            if let Some(outcome) = outcomes.get_mut(drain.limit) {
                outcome.reset_after = drain.drain.reset_after;
                if !outcome.allowed {
                    outcome.retry_after = drain.drain.retry_after;
                }
            }
        }
    }
}

impl Limits {
    /// Returns the state of a new key.
    pub(crate) fn fresh(&self) -> KeyState {
        match self.groups.as_slice() {
            [group] => KeyState::One(group.kernel.fresh()),
            groups => KeyState::Many(groups.iter().map(|group| group.kernel.fresh()).collect()),
        }
    }

    /// Prepares `key_state` for these limits, and converts it if it was written under other limits,
    /// identified by `fingerprint`.
    #[inline]
    pub(crate) fn load(
        &self,
        key_state: KeyState,
        fingerprint: u32,
        now: Timestamp,
        cost: u64,
    ) -> LoadedState {
        if fingerprint == self.fingerprint && self.is_compatible(&key_state) {
            LoadedState {
                key_state,
                former: None,
            }
        } else {
            self.load_converted(key_state, fingerprint, now, cost)
        }
    }

    /// Clamps `key_state`, which was written while the clock was ahead. After clamping, each limit
    /// has at most as many spent units as if it had been exhausted at `at`. `key_state` must be
    /// compatible with these limits.
    #[cold]
    pub(crate) fn clamp(&self, key_state: &mut KeyState, at: Timestamp) {
        // Elastic limits and their stretched limits share one state. The state can contain units
        // that only the stretched limits admit, so clamp the state to the stretched limits.
        let widest = self.stretched().unwrap_or(self);
        for (group, state) in widest.groups.iter().zip(key_state.states_mut()) {
            group.kernel.clamp(state, at);
        }
    }

    /// Returns the limits that deny `cost` now, as a bit mask.
    #[inline]
    pub(crate) fn denied(&self, key_state: &mut KeyState, now: Timestamp, cost: u64) -> Mask {
        let mut denied = 0;
        for (group, state) in self.groups.iter().zip(key_state.states_mut()) {
            let mut windows = group.kernel.denied(state, now, cost);
            while windows != 0 {
                denied |= 1 << group.limit_indices[windows.trailing_zeros() as usize];
                windows &= windows - 1;
            }
        }
        denied
    }

    /// Returns the queueing limits that would delay a request by more than `longest`, as a bit
    /// mask.
    pub(crate) fn exceeds_max_delay(
        &self,
        key_state: &KeyState,
        now: Timestamp,
        longest: Span,
    ) -> Mask {
        let states = self.groups.iter().zip(key_state.states());
        let waiting = states
            .filter(|(group, state)| group.kernel.excess_delay(state, now, longest) > Span::ZERO);
        let indices = waiting.flat_map(|(group, _)| &group.limit_indices);
        indices.fold(0, |denied, index| denied | 1 << *index)
    }

    /// Charges `cost` to every limit.
    #[inline]
    pub(crate) fn charge(&self, key_state: &mut KeyState, now: Timestamp, cost: u64) {
        for (group, state) in self.groups.iter().zip(key_state.states_mut()) {
            group.kernel.charge(state, now, cost);
        }
    }

    /// Returns whether one of the limits counts denied requests.
    pub(crate) fn counts_denials(&self) -> bool {
        let mut groups = self.groups.iter();
        groups.any(|group| group.denials != DenialCounting::NotCounted)
    }

    /// Returns whether a read-only decision should charge `key_state` itself and then undo the
    /// charge, instead of copying the state. Undoing a charge saves time if the state contains a
    /// sliding window log. Returns false if denied requests are counted, because the charge of a
    /// denied request cannot be undone.
    pub(crate) fn can_undo(&self, key_state: &KeyState) -> bool {
        let has_log =
            |state: &KernelState| matches!(state, KernelState::Log(_) | KernelState::Lease(_));
        let mut groups = self.groups.iter();
        self.is_compatible(key_state)
            && key_state.states().iter().any(has_log)
            && groups.all(|group| group.denials == DenialCounting::NotCounted)
    }

    /// Returns the information that [`Self::undo`] needs: a copy of each state, except for sliding
    /// window logs, which can be long. Call this function before charging `key_state`.
    pub(crate) fn before_charge(key_state: &KeyState) -> Vec<UndoRecord> {
        let before = |state: &KernelState| match state {
            KernelState::Log(log) | KernelState::Lease(log) => {
                UndoRecord::LogOfCapacity(log.capacity())
            }
            other => UndoRecord::State(other.clone()),
        };
        key_state.states().iter().map(before).collect()
    }

    /// Undoes the last charge on `key_state`: `units`, charged at `now`. `before` is the result of
    /// [`Self::before_charge`].
    ///
    /// For a sliding window log, this function removes the newest entries. The charge did not drop
    /// old entries: a log drops entries only beyond its largest limit, and an admitted charge is
    /// within all limits.
    pub(crate) fn undo(
        &self,
        key_state: &mut KeyState,
        now: Timestamp,
        units: u64,
        before: Vec<UndoRecord>,
    ) {
        let states = key_state.states_mut().iter_mut().zip(before);
        for (group, (state, before)) in self.groups.iter().zip(states) {
            match before {
                UndoRecord::State(before) => *state = before,
                UndoRecord::LogOfCapacity(capacity) => {
                    group.kernel.refund(state, now, units);
                    if let KernelState::Log(log) | KernelState::Lease(log) = state {
                        log.shrink_to(capacity);
                    }
                }
            }
        }
    }

    /// Refunds `units` to every limit.
    pub(crate) fn refund(&self, key_state: &mut KeyState, now: Timestamp, units: u64) {
        for (group, state) in self.groups.iter().zip(key_state.states_mut()) {
            if group.denials != DenialCounting::NotCounted {
                group.kernel.trim(state, now);
            }
            group.kernel.refund(state, now, units);
        }
    }

    /// Returns the position of the most recent charge in `key_state`, for each limit group; `None`
    /// for groups that do not support refunds by receipt.
    pub(crate) fn marks(&self, key_state: &KeyState) -> Marks {
        let groups = self.groups.iter().zip(key_state.states());
        // A limit that counts denied requests up to the limit gets no mark, unless the rule is in
        // shadow mode, because the state does not distinguish denied from admitted requests.
        let keeps = |group: &LimitGroup| group.denials == DenialCounting::Counted && !self.shadow;
        groups
            .map(|(group, state)| (!keeps(group)).then(|| Kernel::mark(state)))
            .collect()
    }

    /// Returns whether `charged` was charged under limits with the same
    /// [terms](crate::algorithm::Terms). If not, the charge cannot be found.
    pub(crate) fn has_terms_of_charge(&self, charged: &ChargeRecord) -> bool {
        let mut marks = self.groups.iter().zip(&charged.marks);
        // A log and a lease of the same length have the same fingerprint, but other marks.
        let fits = |(group, mark): (&LimitGroup, &Option<Mark>)| {
            let is_lease = matches!(group.kernel, Kernel::Lease(_));
            mark.is_none_or(|mark| matches!(mark, Mark::HeldSince(_)) == is_lease)
        };
        self.fingerprint == charged.fingerprint && marks.all(fits)
    }

    /// Refunds the unused part of a charge to `key_state` and releases its concurrency slots.
    ///
    /// With GCRA, a refund makes later charges drain earlier. For each limit group, the function
    /// returns by how many microseconds later charges drain earlier. The result is 0 if the
    /// algorithm is not GCRA or if there are no later charges. For the group with a given index,
    /// `shift` returns by how many microseconds earlier refunds have already made this charge drain
    /// earlier; see `memory::refund_ledger`.
    pub(crate) fn refund_unused(
        &self,
        key_state: &mut KeyState,
        now: Timestamp,
        charged: &ChargeRecord,
        settlement: Settlement,
        shift: impl Fn(usize) -> Option<u64>,
    ) -> SmallVec<[u64; 1]> {
        let states = key_state.states_mut().iter_mut().zip(&charged.marks);
        let groups = self.groups.iter().zip(states).enumerate();
        let settled = groups.map(|(number, (group, (state, mark)))| {
            let Some(mark) = *mark else { return 0 };
            let position = ChargePosition {
                at: charged.at,
                cost: charged.cost,
                mark,
                shift: shift(number),
            };
            group
                .kernel
                .refund_charge(state, now, &position, settlement.unused)
        });
        settled.collect()
    }

    /// Releases the concurrency slots of `charged` in `key_state`, which has since been written
    /// under other limits. A slot is found by its start time. Nothing is released if the state was
    /// written by other algorithms.
    pub(crate) fn release_slots(&self, key_state: &mut KeyState, charged: &ChargeRecord) {
        if !self.is_alike(key_state) {
            return;
        }
        for (state, mark) in key_state.states_mut().iter_mut().zip(&charged.marks) {
            if let (KernelState::Lease(log), Some(Mark::HeldSince(since))) = (state, mark) {
                log.refund_at(*since, charged.cost);
            }
        }
    }

    /// Renews the leases of `charged` in `key_state`. Returns true if all concurrency slots are
    /// held. Returns false and renews nothing if the state was written by other algorithms. The
    /// limits may have other parameters than those under which the state was written.
    pub(crate) fn renew(
        &self,
        key_state: &mut KeyState,
        now: Timestamp,
        charged: &mut ChargeRecord,
    ) -> bool {
        let mut are_held = self.is_alike(key_state);
        if !are_held {
            return false;
        }
        let states = key_state.states_mut().iter_mut().zip(&mut charged.marks);
        for (group, (state, mark)) in self.groups.iter().zip(states) {
            if let Some(Mark::HeldSince(since)) = mark {
                let is_held = group.kernel.renew(state, now, *since, charged.cost);
                *since = if is_held { now } else { *since };
                are_held &= is_held;
            }
        }
        are_held
    }

    /// Returns whether `key_state` was written by the same algorithms as these limits, whatever
    /// their parameters.
    pub(crate) fn is_alike(&self, key_state: &KeyState) -> bool {
        let states = key_state.states();
        let mut groups = self.groups.iter().zip(states);
        states.len() == self.groups.len()
            && groups.all(|(group, state)| group.kernel.is_kind_of(state))
    }

    /// Returns whether the key is hot: less than half of at least one limit remains.
    pub(crate) fn is_hot(&self, key_state: &KeyState, now: Timestamp) -> bool {
        self.groups
            .iter()
            .zip(key_state.states())
            .any(|(group, state)| {
                group
                    .limit_indices
                    .iter()
                    .enumerate()
                    .any(|(window, index)| {
                        let left = group.kernel.status(state, now, window).remaining;
                        self.limits[*index].is_hot(left)
                    })
            })
    }

    /// Charges the `cost` of a denied request to the limits that count denied requests. Returns
    /// true if the cost was charged to any limit. `denied` is the set of limits that denied the
    /// request.
    #[inline]
    pub(crate) fn charge_denied(
        &self,
        key_state: &mut KeyState,
        now: Timestamp,
        cost: u64,
        denied: Mask,
    ) -> bool {
        let mut charged = false;
        for (group, state) in self.groups.iter().zip(key_state.states_mut()) {
            let counts = match group.denials {
                DenialCounting::NotCounted => false,
                DenialCounting::Counted => true,
                DenialCounting::InFull => group
                    .limit_indices
                    .iter()
                    .any(|index| denied & (1 << index) != 0),
            };
            if counts {
                group.kernel.charge(state, now, cost);
                charged = true;
            }
        }
        charged
    }

    /// Appends the outcome of every limit to `outcomes`, in the order of the rule's list.
    #[inline]
    pub(crate) fn report(
        &self,
        key_state: &KeyState,
        result: EvaluationResult,
        outcomes: &mut Vec<Outcome>,
    ) {
        if let ([group], [limit]) = (self.groups.as_slice(), self.limits.as_slice()) {
            outcomes.push(group.outcome(limit, &key_state.states()[0], 0, result));
            return;
        }
        let first = outcomes.len();
        outcomes.resize(first + self.limits.len(), Outcome::UNSET);
        for (group, state) in self.groups.iter().zip(key_state.states()) {
            for (window, index) in group.limit_indices.iter().enumerate() {
                let result = EvaluationResult {
                    denied: result.denied >> index,
                    ..result
                };
                outcomes[first + index] =
                    group.outcome(&self.limits[*index], state, window, result);
            }
        }
    }

    /// Returns the maximum heap size, in bytes, of a new key's state after a charge of `cost`.
    pub(crate) fn new_entry_bytes(&self, cost: u64) -> usize {
        match self.groups.as_slice() {
            [group] if group.kernel.is_small() => 0,
            [group] => size_of::<KeyState>() + group.kernel.new_entry_bytes(cost),
            groups => {
                let kernels = groups.iter().map(|group| &group.kernel);
                let states =
                    kernels.map(|kernel| size_of::<KernelState>() + kernel.new_entry_bytes(cost));
                size_of::<KeyState>() + states.sum::<usize>()
            }
        }
    }

    /// Returns the maximum number of bytes by which `key_state` grows when `cost` is charged.
    /// `fingerprint` identifies the limits under which the state was written.
    pub(crate) fn growth_bytes(&self, key_state: &KeyState, fingerprint: u32, cost: u64) -> usize {
        if fingerprint == self.fingerprint && self.is_compatible(key_state) {
            let groups = self.groups.iter().zip(key_state.states());
            groups
                .map(|(group, state)| group.kernel.growth_bytes(state, cost))
                .sum()
        } else {
            // A converted state has the size of a new state, plus the entries kept from existing
            // logs.
            let kept = key_state.states().iter().map(KernelState::log_growth_bytes);
            self.new_entry_bytes(cost) + kept.sum::<usize>()
        }
    }

    pub(crate) fn is_compatible(&self, key_state: &KeyState) -> bool {
        let states = key_state.states();
        states.len() == self.groups.len()
            && self
                .groups
                .iter()
                .zip(states)
                .all(|(group, state)| group.kernel.is_compatible(state))
    }

    /// Converts `key_state` for these limits. `terms` contains the units of measure of each state.
    ///
    /// Returns the converted state and, if the conversion lost spent units, the times after which
    /// the unconverted state has drained.
    pub(crate) fn convert(
        &self,
        key_state: KeyState,
        terms: &[Terms],
        now: Timestamp,
        cost: u64,
    ) -> (KeyState, DrainTimes) {
        let own = self.groups.iter().map(|group| group.kernel.terms());
        if own.eq(terms.iter().copied()) && self.is_compatible(&key_state) {
            return (key_state, DrainTimes::default());
        }
        let (mut drains, mut is_exceeded) = (Vec::new(), false);
        let kernels = self.groups.iter().map(|group| &group.kernel);
        let key_state = key_state.converted(kernels, |kernel, index, state| {
            let left_in = terms.get(index);
            if left_in == Some(&kernel.terms()) && kernel.is_compatible(&state) {
                return state;
            }
            let old = left_in.and_then(|terms| kernel.in_terms(terms));
            let drain = kernel.drain(old.as_ref(), &state, now, cost);
            is_exceeded |= drain.is_some();
            // As long as one limit is exceeded, the states of all limits keep their former terms.
            let in_former_units = || {
                // A window contains its end, so its former terms need not be known.
                let is_window = matches!(state, KernelState::Window(_));
                let former = old.as_ref().or_else(|| is_window.then_some(kernel));
                former.map(|former| Drain {
                    retry_after: former.retry(&state, now, 0, cost),
                    reset_after: former.status(&state, now, 0).reset_after,
                })
            };
            if let Some(drain) = drain.or_else(in_former_units) {
                let mut groups = self.groups.iter();
                let group = groups.find(|group| std::ptr::eq(&raw const group.kernel, kernel));
                let indices = group.map_or(&[][..], |group| &group.limit_indices);
                drains.extend(indices.iter().map(|limit| LimitDrain {
                    limit: *limit,
                    drain,
                }));
            }
            kernel.adopt(old.as_ref(), state, now)
        });
        if !is_exceeded {
            drains.clear();
        }
        (key_state, DrainTimes(drains))
    }

    /// Converts a state written under other limits, identified by `fingerprint`.
    ///
    /// If the terms of the other limits are unknown, the conversion uses only the state itself.
    #[cold]
    fn load_converted(
        &self,
        former: KeyState,
        fingerprint: u32,
        now: Timestamp,
        cost: u64,
    ) -> LoadedState {
        let terms = self.former_terms(fingerprint);
        let terms = terms.as_deref().unwrap_or_default();
        // The shard is locked during the conversion. To keep the shard locked only briefly, first
        // convert a copy in which each sliding window log has only its newest entry. This copy
        // expires at the same instant as the whole state.
        let (key_state, drain_times) = self.convert(with_short_logs(&former), terms, now, cost);
        let is_lost = key_state.expires() <= now && former.expires() > now;
        if !is_lost && drain_times.is_empty() {
            let (key_state, _) = self.convert(former, terms, now, cost);
            return LoadedState {
                key_state,
                former: None,
            };
        }
        // If the conversion of the copy kept no log entries, the conversion of the whole state has
        // the same result.
        let key_state = match is_lost {
            true => key_state,
            false => self.convert(former.clone(), terms, now, cost).0,
        };
        let former = FormerState {
            key_state: former,
            fingerprint,
            drain_times,
            is_lost,
        };
        LoadedState {
            key_state,
            former: Some(Box::new(former)),
        }
    }
}

/// Returns a copy of `key_state` in which each sliding window log has only its newest entry. A
/// log's expiry depends only on that entry.
fn with_short_logs(key_state: &KeyState) -> KeyState {
    let short = |log: &LogState| {
        let newest = (log.stamps().len() > 0).then(|| Stamp::of(log.newest().as_micros(), 1));
        let stamps = newest.into_iter().collect();
        Box::new(LogState::from_stamps(stamps, log.longest()))
    };
    let states = key_state.states().iter().map(|state| match state {
        KernelState::Log(log) => KernelState::Log(short(log)),
        KernelState::Lease(log) => KernelState::Lease(short(log)),
        other => other.clone(),
    });
    KeyState::from_states(states.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        algorithm::RetryAfter,
        limit::{Algorithm, Counting, Limit, Rate, RefillMode},
        time::Span,
    };

    /// Copying a large sliding window log would take too long, because the shard is locked while
    /// the log is loaded.
    #[test]
    fn loading_a_log_under_other_limits_does_not_copy_it() {
        let limits = |algorithm| Limits::new(vec![Limit::new(algorithm).unwrap()]).unwrap();
        let log = |count, secs| {
            let window = Span::from_secs(secs);
            limits(Algorithm::SlidingWindowLog {
                limit: count,
                window,
            })
        };
        let gcra = limits(Algorithm::Gcra {
            rate: Rate {
                count: 5,
                period: Span::from_secs(60),
            },
            burst: 5,
        });
        let address = |cell: &KeyState| match &cell.states()[0] {
            KernelState::Log(log) => std::ptr::from_ref::<LogState>(log),
            other => panic!("not a log: {other:?}"),
        };
        let hourly = log(100, 3_600);
        let now = Timestamp::from_micros(1_700_000_000_000_000);
        let left = || {
            let mut cell = hourly.fresh();
            hourly.charge(&mut cell, now, 7);
            let at = address(&cell);
            (cell, at)
        };
        // A different algorithm cannot use the log, so `load` returns the log unchanged as the
        // former state.
        let (cell, at) = left();
        let before = cell.clone();
        let loaded = gcra.load(cell, hourly.fingerprint(), now, 1);
        let kept = loaded.former.unwrap();
        assert_eq!((address(&kept.key_state), &kept.key_state), (at, &before));
        assert_eq!(loaded.key_state, gcra.fresh());
        // A sliding window log with other parameters keeps the entries.
        let (cell, at) = left();
        let loaded = log(50, 600).load(cell, hourly.fingerprint(), now, 1);
        assert!(loaded.former.is_none());
        assert_eq!(address(&loaded.key_state), at);
        // All entries are outside the shorter window, so `load` also returns the former state.
        let (cell, at) = left();
        let later = now.after(Span::from_secs(61));
        let minute = log(50, 60);
        let loaded = minute.load(cell, hourly.fingerprint(), later, 1);
        assert_eq!(address(&loaded.former.unwrap().key_state), at);
        let mut cell = loaded.key_state;
        assert_eq!(minute.denied(&mut cell, later, 50), 0);
    }

    /// The Redis store keeps the former state if a conversion would lose spent units, so the
    /// conversion must report the limits that would lose spent units.
    #[test]
    fn converting_names_the_limits_that_lose_spent_units() {
        let bucket = |capacity, count, secs| {
            let algorithm = Algorithm::TokenBucket {
                capacity,
                refill: Rate {
                    count,
                    period: Span::from_secs(secs),
                },
                mode: RefillMode::Interval,
            };
            Limits::new(vec![Limit::new(algorithm).unwrap()]).unwrap()
        };
        let now = Timestamp::from_micros(1_700_000_000_000_000);
        let old = bucket(1_000, 100, 1);
        let terms = [old.groups[0].kernel.terms()];
        let mut empty = old.fresh();
        old.charge(&mut empty, now, 1_000);
        // Refilling 1,000 tokens at the new rate would take 1,000 s. The new bucket refills within
        // 10 s, because at most 10 tokens can be missing, so spent units are lost.
        let (_, lost) = bucket(10, 1, 1).convert(empty.clone(), &terms, now, 1);
        // At the old rate, 991 of the 1,000 missing tokens must be refilled before the new capacity
        // of 10 admits a request.
        let waits: Vec<_> = lost
            .0
            .iter()
            .map(|lost| (lost.limit, lost.drain.retry_after))
            .collect();
        assert_eq!(waits, [(0, RetryAfter::After(Span::from_secs(10)))]);
        // With an equal or faster refill rate, no missing tokens are lost.
        for (capacity, count) in [(1_000, 200), (500, 100)] {
            let new = bucket(capacity, count, 1);
            let (_, lost) = new.convert(empty.clone(), &terms, now, 1);
            assert!(lost.is_empty(), "{capacity}, {count}/s");
        }
        // A full bucket has no missing tokens, so a conversion loses nothing.
        let (_, lost) = bucket(10, 1, 1).convert(old.fresh(), &terms, now, 1);
        assert!(lost.is_empty());
        // Repeat the test with a bucket that is refilled continuously.
        let gcra = |burst, count| {
            let rate = Rate {
                count,
                period: Span::from_secs(1),
            };
            Limits::new(vec![Limit::new(Algorithm::Gcra { rate, burst }).unwrap()]).unwrap()
        };
        let old = gcra(1_000, 100);
        let terms = [old.groups[0].kernel.terms()];
        let mut spent = old.fresh();
        old.charge(&mut spent, now, 1_000);
        let lost_by = |burst, count| {
            let (_, lost) = gcra(burst, count).convert(spent.clone(), &terms, now, 1);
            lost.0.iter().map(|lost| lost.limit).collect::<Vec<_>>()
        };
        assert_eq!(lost_by(10, 1), [0]);
        assert_eq!(lost_by(1_000, 200), [0; 0]);
        // A weighted counter loses spent units if the new limit is smaller.
        let weighted = |limit, secs| {
            let algorithm = Algorithm::SlidingWindowCounter {
                limit,
                window: Span::from_secs(secs),
                counting: Counting::Weighted,
            };
            Limits::new(vec![Limit::new(algorithm).unwrap()]).unwrap()
        };
        let old = weighted(100, 60);
        let terms = [old.groups[0].kernel.terms()];
        let mut counted = old.fresh();
        old.charge(&mut counted, now, 100);
        let lost_by = |limit| {
            let (_, lost) = weighted(limit, 61).convert(counted.clone(), &terms, now, 1);
            lost.0.iter().map(|lost| lost.limit).collect::<Vec<_>>()
        };
        assert_eq!(lost_by(99), [0]);
        assert_eq!(lost_by(100), [0; 0]);
    }

    /// The bytes reserved for a charge cover the growth of the state. No bytes are reserved for
    /// states of a fixed size.
    #[test]
    fn a_charge_grows_a_state_by_at_most_the_reserved_bytes() {
        let window = Span::from_secs(60);
        let rate = Rate {
            count: 100,
            period: window,
        };
        let logs = [
            Algorithm::SlidingWindowLog { limit: 100, window },
            Algorithm::Concurrency {
                limit: 100,
                lease: window,
            },
        ];
        let fixed = [
            Algorithm::Gcra { rate, burst: 100 },
            Algorithm::SlidingWindowCounter {
                limit: 100,
                window,
                counting: Counting::Weighted,
            },
            Algorithm::SlidingWindowCounter {
                limit: 100,
                window,
                counting: Counting::Buckets {
                    buckets: 60,
                    strict: false,
                },
            },
        ];
        let limits = |algorithm: &Algorithm| {
            Limits::new(vec![Limit::new(algorithm.clone()).unwrap()]).unwrap()
        };
        let (other, now) = (limits(&fixed[0]), Timestamp::from_micros(1));
        for (algorithm, is_log) in logs
            .iter()
            .map(|log| (log, true))
            .chain(fixed.iter().map(|fixed| (fixed, false)))
        {
            let limits = limits(algorithm);
            let mut state = limits.fresh();
            for number in 0..100 {
                let reserved = limits.growth_bytes(&state, limits.fingerprint, 1);
                let before = state.boxed_bytes();
                limits.charge(&mut state, now.after(Span::from_micros(number)), 1);
                assert!(state.boxed_bytes() <= before + reserved, "{algorithm:?}");
                assert!(is_log || reserved == 0, "{algorithm:?}");
            }
            if !is_log {
                // A conversion of this state needs as many bytes as a new state, because there are
                // no log entries to keep.
                let converted = other.growth_bytes(&state, other.fingerprint ^ 1, 1);
                assert_eq!(converted, other.new_entry_bytes(1), "{algorithm:?}");
            }
        }
        let buckets = limits(&fixed[2]).fresh();
        assert!(buckets.boxed_bytes() >= 60 * size_of::<u64>());
    }

    /// With a refill above `u32::MAX`, the state can contain a number of more than 32 bits, so a
    /// new key needs heap memory.
    #[test]
    fn a_large_interval_refill_is_stored_on_the_heap() {
        let new_entry_bytes = |refill: u64| {
            let algorithm = Algorithm::TokenBucket {
                capacity: 2 * refill,
                refill: Rate {
                    count: refill,
                    period: Span::from_secs(3_600),
                },
                mode: RefillMode::Interval,
            };
            let limits = Limits::new(vec![Limit::new(algorithm).unwrap()]).unwrap();
            limits.new_entry_bytes(1)
        };
        assert_eq!(new_entry_bytes(u32::MAX.into()), 0);
        assert_eq!(
            new_entry_bytes(u64::from(u32::MAX) + 1),
            size_of::<KeyState>()
        );
    }
}
