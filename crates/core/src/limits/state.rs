//! What the limits of a rule do with the state of one key: each member with its own.

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

/// What is needed to undo a charge on one state.
#[derive(Debug)]
pub(crate) enum Before {
    /// The state.
    State(State),
    /// The room that a log had; what was charged can be taken out again.
    LogOfCapacity(usize),
}

/// A cell that the limits can evaluate.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) cell: Cell,
    /// The cell as other limits left it, if the conversion kept nothing of it.
    pub(crate) left: Option<Box<LeftCell>>,
}

/// A cell that other limits left and these cannot evaluate.
///
/// A decision that writes nothing puts it back, so that a denial takes nothing from limits that come back, or
/// from another server that still has them.
#[derive(Debug)]
pub(crate) struct LeftCell {
    pub(crate) cell: Cell,
    /// Of the limits that left it.
    pub(crate) fingerprint: u32,
}

impl Limits {
    /// What is remembered of a key that was never seen.
    pub(crate) fn fresh(&self) -> Cell {
        match self.members.as_slice() {
            [member] => Cell::One(member.kernel.fresh()),
            members => Cell::Many(members.iter().map(|member| member.kernel.fresh()).collect()),
        }
    }

    /// Returns `cell`, which limits of `fingerprint` left, as a cell that these limits can evaluate.
    #[inline]
    pub(crate) fn load(&self, cell: Cell, fingerprint: u32, now: Timestamp) -> Loaded {
        if fingerprint == self.fingerprint && self.knows(&cell) {
            Loaded { cell, left: None }
        } else {
            self.load_converted(cell, fingerprint, now)
        }
    }

    /// Pulls the states of a cell, one that these limits know, back to what a key that was charged to its
    /// maximum at `at` can have at most.
    #[cold]
    pub(crate) fn clamp(&self, cell: &mut Cell, at: Timestamp) {
        // Elastic limits and their wider form share one state, which may hold what only the wider form admits.
        let widest = self.stretched().unwrap_or(self);
        for (member, state) in widest.members.iter().zip(cell.states_mut()) {
            member.kernel.clamp(state, at);
        }
    }

    /// The limits that deny `cost` now.
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

    /// The limits that would hold a request back for more than `longest`.
    pub(crate) fn kept_waiting(&self, cell: &Cell, now: Timestamp, longest: Span) -> Mask {
        let states = self.members.iter().zip(cell.states());
        let waiting = states
            .filter(|(member, state)| member.kernel.overlong(state, now, longest) > Span::ZERO);
        let parts = waiting.flat_map(|(member, _)| &member.parts);
        parts.fold(0, |denied, part| denied | 1 << *part)
    }

    /// Spends `cost` of every limit.
    #[inline]
    pub(crate) fn charge(&self, cell: &mut Cell, now: Timestamp, cost: u64) {
        for (member, state) in self.members.iter().zip(cell.states_mut()) {
            member.kernel.charge(state, now, cost);
        }
    }

    /// Whether one of the limits counts requests that are denied.
    pub(crate) fn counts_denials(&self) -> bool {
        let mut members = self.members.iter();
        members.any(|member| member.denials != Denials::Forgotten)
    }

    /// Whether a charge on `cell`, one that these limits left, can be undone without a copy of all of it: it holds a
    /// log, and what is denied charges nothing.
    pub(crate) fn can_undo(&self, cell: &Cell) -> bool {
        let has_log = |state: &State| matches!(state, State::Log(_) | State::Lease(_));
        let mut members = self.members.iter();
        self.knows(cell)
            && cell.states().iter().any(has_log)
            && members.all(|member| member.denials == Denials::Forgotten)
    }

    /// What [`Self::undo`] needs of `cell` before it is charged: a copy of each state but logs, which may be long.
    pub(crate) fn before_charge(cell: &Cell) -> Vec<Before> {
        let before = |state: &State| match state {
            State::Log(log) | State::Lease(log) => Before::LogOfCapacity(log.capacity()),
            other => Before::State(other.clone()),
        };
        cell.states().iter().map(before).collect()
    }

    /// Takes `units` out of `cell` that were charged last, at `now`, so that it is what it was `before`.
    ///
    /// The newest entries of a log are taken away again. None has left it at the other end to make room: a log drops
    /// entries only beyond its largest limit, and what was admitted lies within all of them.
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

    /// Gives `units` back to every limit.
    pub(crate) fn refund(&self, cell: &mut Cell, now: Timestamp, units: u64) {
        for (member, state) in self.members.iter().zip(cell.states_mut()) {
            if self.shadow || member.denials != Denials::Forgotten {
                member.kernel.trim(state, now);
            }
            member.kernel.refund(state, now, units);
        }
    }

    /// Where in `cell` the charge is that was just made.
    pub(crate) fn marks(&self, cell: &Cell) -> Box<[Option<Mark>]> {
        let members = self.members.iter().zip(cell.states());
        // What is denied is counted as well there: nothing can be told apart.
        let keeps = |member: &Member| member.denials == Denials::Counted && !self.shadow;
        members
            .map(|(member, state)| (!keeps(member)).then(|| Kernel::mark(state)))
            .collect()
    }

    /// Takes what is to come back of a charge out of `cell`. Answers by how much those behind it moved up in each member that is a
    /// schedule: by nothing where it was the last in line. `shift` says how much others have moved it up since.
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

    /// Gives the places back that `charged`, of these limits, took in `cell`, which was left under other numbers since: a place is
    /// found by its instant, if the kernels are the same.
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

    /// Renews the places of `charged`, of these limits, in `cell`, whatever numbers it was left under, if the kernels are the same;
    /// true if all are held.
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

    /// Whether `cell` was left by kernels such as these, under whatever numbers.
    fn is_alike(&self, cell: &Cell) -> bool {
        let states = cell.states();
        let mut members = self.members.iter().zip(states);
        states.len() == self.members.len()
            && members.all(|(member, state)| member.kernel.is_kind_of(state))
    }

    /// Whether less than half of one of the limits is left.
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

    /// Spends `cost`, which is denied, of the limits that count it nevertheless; true if there are any. `denied` are the
    /// limits that denied it themselves.
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

    /// Appends what every limit answers, given those that `denied` and whether `cost` was `charged`.
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

    /// The most bytes on the heap that the state of a new key takes once `cost` is charged.
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

    /// The most bytes that `cell`, left under limits of `fingerprint`, grows by when `cost` is charged.
    pub(crate) fn growth_bytes(&self, cell: &Cell, fingerprint: u32, cost: u64) -> usize {
        if fingerprint == self.fingerprint && self.knows(cell) {
            let members = self.members.iter().zip(cell.states());
            members
                .map(|(member, state)| member.kernel.growth_bytes(state, cost))
                .sum()
        } else {
            // What is taken over is at most what was there, in the shape of something new.
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

    /// Makes `cell`, whose states were left in `terms`, one that these limits know. Answers the limits whose state loses something by
    /// that, each with the time until `cost` is admitted by the state as it was left.
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

    /// Converts a cell that other limits left. The terms of limits that are not remembered as former
    /// ones are unknown: their states are converted by what the states themselves tell.
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

    /// A refill over `u32::MAX` can leave a number in the state that does not fit 32 bits, so room on
    /// the heap is counted for a new key.
    #[test]
    fn a_large_refill_by_interval_needs_room_on_the_heap() {
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
