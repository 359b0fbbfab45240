//! Operations of a rule's limits on the state of one key. Each kernel (algorithm instance) works on
//! its own part of the state.

use super::{Limits, Mask};
use crate::{
    cell::Cell,
    kernel::{Kernel, Mark, State},
    member::{Asked, Denials, Member},
    outcome::{Outcome, Retry},
    receipt::{Charged, Place, Settlement},
    remote::Terms,
    time::{Span, Timestamp},
};

/// The information needed to undo a charge on one state.
#[derive(Debug)]
pub(crate) enum Before {
    /// A copy of the state.
    State(State),
    /// The former capacity of a log. The log itself is not copied, because the charge can be
    /// removed from it again.
    LogOfCapacity(usize),
}

/// A cell that the limits can evaluate.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) cell: Cell,
    /// The cell before its conversion, if the conversion kept nothing of it.
    pub(crate) left: Option<Box<LeftCell>>,
}

/// A cell that other limits wrote and these cannot evaluate.
///
/// A decision that writes nothing puts it back. So a denial takes nothing from limits that may come
/// back, or that another server still has.
#[derive(Debug)]
pub(crate) struct LeftCell {
    pub(crate) cell: Cell,
    /// Identifies the limits that wrote it.
    pub(crate) fingerprint: u32,
}

impl Limits {
    /// Returns the state of a new key.
    pub(crate) fn fresh(&self) -> Cell {
        match self.members.as_slice() {
            [member] => Cell::One(member.kernel.fresh()),
            members => Cell::Many(members.iter().map(|member| member.kernel.fresh()).collect()),
        }
    }

    /// Returns `cell`, converted if it was not written under these limits. `fingerprint` identifies
    /// the limits under which it was written.
    #[inline]
    pub(crate) fn load(&self, cell: Cell, fingerprint: u32, now: Timestamp) -> Loaded {
        if fingerprint == self.fingerprint && self.knows(&cell) {
            Loaded { cell, left: None }
        } else {
            self.load_converted(cell, fingerprint, now)
        }
    }

    /// Clamps the states of `cell` to those of a key that was charged to its maximum at `at`.
    /// `cell` must be compatible with these limits.
    #[cold]
    pub(crate) fn clamp(&self, cell: &mut Cell, at: Timestamp) {
        // Elastic limits and their stretched form share one state. It may hold units that only the
        // stretched form admits, so clamp to the stretched limits.
        let widest = self.stretched().unwrap_or(self);
        for (member, state) in widest.members.iter().zip(cell.states_mut()) {
            member.kernel.clamp(state, at);
        }
    }

    /// Returns the limits that deny `cost` now.
    #[inline]
    pub(crate) fn denied(&self, cell: &mut Cell, now: Timestamp, cost: u64) -> Mask {
        let mut denied = 0;
        for (member, state) in self.members.iter().zip(cell.states_mut()) {
            let mut parts = member.kernel.denied(state, now, cost);
            while parts != 0 {
                denied |= 1 << member.parts[parts.trailing_zeros() as usize];
                parts &= parts - 1;
            }
        }
        denied
    }

    /// Returns the limits that would delay a request by more than `longest`.
    pub(crate) fn kept_waiting(&self, cell: &Cell, now: Timestamp, longest: Span) -> Mask {
        let states = self.members.iter().zip(cell.states());
        let waiting = states
            .filter(|(member, state)| member.kernel.overlong(state, now, longest) > Span::ZERO);
        let parts = waiting.flat_map(|(member, _)| &member.parts);
        parts.fold(0, |denied, part| denied | 1 << *part)
    }

    /// Charges `cost` to every limit.
    #[inline]
    pub(crate) fn charge(&self, cell: &mut Cell, now: Timestamp, cost: u64) {
        for (member, state) in self.members.iter().zip(cell.states_mut()) {
            member.kernel.charge(state, now, cost);
        }
    }

    /// Whether one of the limits counts denied requests.
    pub(crate) fn counts_denials(&self) -> bool {
        let mut members = self.members.iter();
        members.any(|member| member.denials != Denials::Forgotten)
    }

    /// Returns whether a charge on `cell` can be undone without a full copy. That is worthwhile if
    /// the cell contains a log, and possible if denied requests are not counted.
    pub(crate) fn can_undo(&self, cell: &Cell) -> bool {
        let has_log = |state: &State| matches!(state, State::Log(_) | State::Lease(_));
        let mut members = self.members.iter();
        self.knows(cell)
            && cell.states().iter().any(has_log)
            && members.all(|member| member.denials == Denials::Forgotten)
    }

    /// Returns the information that [`Self::undo`] needs, before `cell` is charged: a copy of each
    /// state, except logs, which may be long.
    pub(crate) fn before_charge(cell: &Cell) -> Vec<Before> {
        let before = |state: &State| match state {
            State::Log(log) | State::Lease(log) => Before::LogOfCapacity(log.capacity()),
            other => Before::State(other.clone()),
        };
        cell.states().iter().map(before).collect()
    }

    /// Restores `cell` to its state `before` the last charge, which was of `units` at `now`.
    ///
    /// For a log, this removes its newest entries. The charge cannot have removed entries at the
    /// old end: a log drops entries only beyond its largest limit, and an admitted charge is within
    /// all limits.
    pub(crate) fn undo(&self, cell: &mut Cell, now: Timestamp, units: u64, before: Vec<Before>) {
        let states = cell.states_mut().iter_mut().zip(before);
        for (member, (state, before)) in self.members.iter().zip(states) {
            match before {
                Before::State(before) => *state = before,
                Before::LogOfCapacity(capacity) => {
                    member.kernel.refund(state, now, units);
                    if let State::Log(log) | State::Lease(log) = state {
                        log.shrink_to(capacity);
                    }
                }
            }
        }
    }

    /// Refunds `units` to every limit.
    pub(crate) fn refund(&self, cell: &mut Cell, now: Timestamp, units: u64) {
        for (member, state) in self.members.iter().zip(cell.states_mut()) {
            if self.shadow || member.denials != Denials::Forgotten {
                member.kernel.trim(state, now);
            }
            member.kernel.refund(state, now, units);
        }
    }

    /// Returns the position in `cell` of the charge that was just made, for each kernel. `None` for
    /// kernels that do not support refunds by receipt.
    pub(crate) fn marks(&self, cell: &Cell) -> Box<[Option<Mark>]> {
        let members = self.members.iter().zip(cell.states());
        // Such a limit also counts denied requests, and its state does not distinguish them from
        // admitted ones.
        let keeps = |member: &Member| member.denials == Denials::Counted && !self.shadow;
        members
            .map(|(member, state)| (!keeps(member)).then(|| Kernel::mark(state)))
            .collect()
    }

    /// Removes the unused part of a charge from `cell` and releases its concurrency slots.
    ///
    /// Returns, for each kernel, by how many microseconds this moved later charges forward in a
    /// GCRA schedule: 0 for other kernels, and if the charge was the last one. `shift` returns by
    /// how much earlier refunds have moved the charge of a kernel forward; see `memory::ledger`.
    pub(crate) fn settle(
        &self,
        cell: &mut Cell,
        now: Timestamp,
        (charged, settlement): (&Charged, Settlement),
        shift: impl Fn(usize) -> Option<u64>,
    ) -> Vec<u64> {
        let states = cell.states_mut().iter_mut().zip(&charged.marks);
        let members = self.members.iter().zip(states).enumerate();
        let settled = members.map(|(number, (member, (state, mark)))| {
            let Some(mark) = *mark else { return 0 };
            let place = Place {
                at: charged.at,
                cost: charged.cost,
                mark,
                shift: shift(number),
            };
            member
                .kernel
                .give_back(state, now, &place, settlement.unused)
        });
        settled.collect()
    }

    /// Releases the concurrency slots that `charged` holds in `cell`, although the state was since
    /// written under other limits. Slots are found by their start time if the kernels are of the
    /// same kinds.
    pub(crate) fn leave(&self, cell: &mut Cell, charged: &Charged) {
        if !self.is_alike(cell) {
            return;
        }
        for (state, mark) in cell.states_mut().iter_mut().zip(&charged.marks) {
            if let (State::Lease(log), Some(Mark::HeldSince(since))) = (state, mark) {
                log.give_back(*since, charged.cost);
            }
        }
    }

    /// Renews the leases of `charged` in `cell`, under whatever limits it was written, if the
    /// kernels are of the same kinds. Returns true if all concurrency slots are held.
    pub(crate) fn renew(&self, cell: &mut Cell, now: Timestamp, charged: &mut Charged) -> bool {
        let mut are_held = self.is_alike(cell);
        if !are_held {
            return false;
        }
        let states = cell.states_mut().iter_mut().zip(&mut charged.marks);
        for (member, (state, mark)) in self.members.iter().zip(states) {
            if let Some(Mark::HeldSince(since)) = mark {
                let is_held = member.kernel.renew(state, now, (*since, charged.cost));
                *since = if is_held { now } else { *since };
                are_held &= is_held;
            }
        }
        are_held
    }

    /// Returns whether `cell` was written by kernels of the same kinds, with any numbers.
    fn is_alike(&self, cell: &Cell) -> bool {
        let states = cell.states();
        let mut members = self.members.iter().zip(states);
        states.len() == self.members.len()
            && members.all(|(member, state)| member.kernel.is_kind_of(state))
    }

    /// Returns whether less than half of any limit remains.
    pub(crate) fn is_pressed(&self, cell: &Cell, now: Timestamp) -> bool {
        self.members
            .iter()
            .zip(cell.states())
            .any(|(member, state)| {
                member.parts.iter().enumerate().any(|(part, index)| {
                    let left = member.kernel.standing(state, now, part).remaining;
                    self.limits[*index].is_pressed(left)
                })
            })
    }

    /// Charges a denied `cost` to the limits that count denied requests. Returns true if there are
    /// any. `denied` are the limits that denied the request.
    #[inline]
    pub(crate) fn charge_denied(
        &self,
        cell: &mut Cell,
        now: Timestamp,
        cost: u64,
        denied: Mask,
    ) -> bool {
        let mut charged = false;
        for (member, state) in self.members.iter().zip(cell.states_mut()) {
            let counts = match member.denials {
                Denials::Forgotten => false,
                Denials::Counted => true,
                Denials::InFull => member.parts.iter().any(|part| denied & (1 << part) != 0),
            };
            if counts {
                member.kernel.charge(state, now, cost);
                charged = true;
            }
        }
        charged
    }

    /// Appends the outcome of every limit.
    #[inline]
    pub(crate) fn report(&self, cell: &Cell, asked: Asked, outcomes: &mut Vec<Outcome>) {
        if let ([member], [limit]) = (self.members.as_slice(), self.limits.as_slice()) {
            outcomes.push(member.outcome(limit, &cell.states()[0], 0, asked));
            return;
        }
        let first = outcomes.len();
        outcomes.resize(first + self.limits.len(), Outcome::UNSET);
        for (member, state) in self.members.iter().zip(cell.states()) {
            for (part, index) in member.parts.iter().enumerate() {
                let asked = Asked {
                    denied: asked.denied >> index,
                    ..asked
                };
                outcomes[first + index] = member.outcome(&self.limits[*index], state, part, asked);
            }
        }
    }

    /// Returns the maximum number of heap bytes of a new key's state after `cost` is charged.
    pub(crate) fn newcomer_bytes(&self, cost: u64) -> usize {
        match self.members.as_slice() {
            [member] if member.kernel.is_small() => 0,
            [member] => size_of::<Cell>() + member.kernel.newcomer_bytes(cost),
            members => {
                let kernels = members.iter().map(|member| &member.kernel);
                let states = kernels.map(|kernel| size_of::<State>() + kernel.newcomer_bytes(cost));
                size_of::<Cell>() + states.sum::<usize>()
            }
        }
    }

    /// Returns the maximum number of bytes by which `cell` grows when `cost` is charged.
    /// `fingerprint` identifies the limits under which it was written.
    pub(crate) fn growth_bytes(&self, cell: &Cell, fingerprint: u32, cost: u64) -> usize {
        if fingerprint == self.fingerprint && self.knows(cell) {
            let members = self.members.iter().zip(cell.states());
            members
                .map(|(member, state)| member.kernel.growth_bytes(state, cost))
                .sum()
        } else {
            // A converted state has the size of a new one, plus the entries kept from existing
            // logs.
            let kept = cell.states().iter().map(State::log_growth_bytes);
            self.newcomer_bytes(cost) + kept.sum::<usize>()
        }
    }

    fn knows(&self, cell: &Cell) -> bool {
        let states = cell.states();
        states.len() == self.members.len()
            && self
                .members
                .iter()
                .zip(states)
                .all(|(member, state)| member.kernel.knows(state))
    }

    /// Converts `cell`, in which the states are counted in `terms`, for these limits.
    ///
    /// Returns the converted cell, and a list of the limits that lost part of the spent units. Each
    /// comes with the time until its unconverted state admits `cost`.
    pub(crate) fn convert(
        &self,
        (cell, terms): (Cell, &[Terms]),
        now: Timestamp,
        cost: u64,
    ) -> (Cell, Vec<(usize, Retry)>) {
        let own = self.members.iter().map(|member| member.kernel.terms());
        if own.eq(terms.iter().copied()) && self.knows(&cell) {
            return (cell, Vec::new());
        }
        let mut inexact = Vec::new();
        let kernels = self.members.iter().map(|member| &member.kernel);
        let cell = cell.taken_over(kernels, |kernel, index, state| {
            let left_in = terms.get(index);
            if left_in == Some(&kernel.terms()) && kernel.knows(&state) {
                return state;
            }
            let old = left_in.and_then(|terms| kernel.in_terms(terms));
            if !kernel.adopts_all(old.as_ref(), &state, now) {
                let mut members = self.members.iter();
                let member = members.find(|member| std::ptr::eq(&raw const member.kernel, kernel));
                let retry = old
                    .as_ref()
                    .map_or(Retry::NOW, |old| old.retry(&state, now, 0, cost));
                let parts = member.map_or(&[][..], |member| &member.parts);
                inexact.extend(parts.iter().map(|part| (*part, retry)));
            }
            kernel.adopt(old.as_ref(), state, now)
        });
        (cell, inexact)
    }

    /// Converts states that were written under other limits.
    ///
    /// If these limits do not remember the others as former ones, only the states themselves tell
    /// what they count.
    #[cold]
    fn load_converted(&self, left: Cell, fingerprint: u32, now: Timestamp) -> Loaded {
        let members = self.former(fingerprint).map(|former| &former.members[..]);
        let terms = members.unwrap_or_default().iter();
        let terms: Vec<Terms> = terms.map(|member| member.kernel.terms()).collect();
        let (cell, _) = self.convert((left.clone(), &terms), now, 0);
        let is_lost = cell.expires() <= now && left.expires() > now;
        let left = LeftCell {
            cell: left,
            fingerprint,
        };
        Loaded {
            cell,
            left: is_lost.then(|| Box::new(left)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        limit::{Algorithm, Limit, Rate, RefillMode},
        time::Span,
    };

    /// With a refill above `u32::MAX`, the state may contain a number that does not fit 32 bits, so
    /// heap space has to be reserved for a new key.
    #[test]
    fn a_large_interval_refill_is_stored_on_the_heap() {
        let newcomer_bytes = |refill: u64| {
            let algorithm = Algorithm::TokenBucket {
                capacity: 2 * refill,
                refill: Rate {
                    count: refill,
                    period: Span::from_secs(3_600),
                },
                mode: RefillMode::Interval,
            };
            let limits = Limits::new(vec![Limit::new(algorithm).unwrap()]).unwrap();
            limits.newcomer_bytes(1)
        };
        assert_eq!(newcomer_bytes(u32::MAX.into()), 0);
        assert_eq!(newcomer_bytes(u64::from(u32::MAX) + 1), size_of::<Cell>());
    }
}
