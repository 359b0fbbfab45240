//! A rule's limits, compiled: all of them share one key and so one state.

use std::sync::{Arc, OnceLock};

use crate::{
    bounds,
    cell::Cell,
    failure::{OnFailure, Share},
    kernel::{Kernel, Mark, Schedule, State},
    limit::{Algorithm, Limit, LimitError},
    member::{Asked, Denials, Member},
    outcome::Outcome,
    receipt::{Charged, Place, Settlement},
    time::{Span, Timestamp},
};

/// A rule's limits over one key, compiled into kernels.
///
/// # Examples
///
/// ```
/// use tidegate_core::{AlgorithmName, LimitSpec, Limits, notation};
///
/// let limit = |text| LimitSpec::shorthand(notation::rate(text).unwrap(), AlgorithmName::SlidingWindowLog).build().unwrap();
/// let limits = Limits::new(vec![limit("1/s"), limit("20/min")]).unwrap().named("api");
/// assert_eq!((limits.name(), limits.len()), (Some("api"), 2));
/// ```
#[derive(Clone, Debug)]
pub struct Limits {
    name: Option<Arc<str>>,
    shadow: bool,
    limits: Vec<Limit>,
    members: Vec<Member>,
    fingerprint: u32,
    sole_schedule: Option<Schedule>,
    formerly: Option<Arc<Self>>,
    on_failure: Option<OnFailure>,
    /// This node's share, once it was needed.
    share: OnceLock<(Share, Arc<Self>)>,
    /// By how many percent the limits stretch where there is room, and the limits then, once they were needed.
    stretch: u32,
    stretched: OnceLock<Arc<Self>>,
    /// Of stretched limits, what they were.
    unstretched: Option<Arc<Self>>,
}

/// Limits as bits, in the order of the rule's list.
pub(crate) type Mask = u16;

const _: () = assert!(
    bounds::MAX_LIMITS_PER_RULE <= Mask::BITS as usize,
    "every limit has its bit"
);

impl Limits {
    /// How many sets of former limits are remembered, so that states left under them are taken over exactly.
    const MAX_FORMER: usize = 4;

    /// Compiles `limits`.
    ///
    /// # Errors
    ///
    /// Refuses no limit at all and more than [`bounds::MAX_LIMITS_PER_RULE`].
    pub fn new(limits: Vec<Limit>) -> Result<Self, LimitError> {
        if limits.is_empty() {
            return Err(LimitError::new("limits", "must name at least one limit"));
        }
        if limits.len() > bounds::MAX_LIMITS_PER_RULE {
            let problem = format!(
                "{} limits are over the maximum of {} a rule",
                limits.len(),
                bounds::MAX_LIMITS_PER_RULE
            );
            return Err(LimitError::new("limits", problem));
        }
        let mut members: Vec<Member> = Vec::with_capacity(limits.len());
        for (index, limit) in limits.iter().enumerate() {
            let kernel = Kernel::compile(limit)?;
            let denials = Denials::of(limit);
            match members
                .iter_mut()
                .find(|member| member.shares_log(&kernel, denials))
            {
                Some(member) => member.join(&kernel, index),
                None => members.push(Member {
                    kernel,
                    parts: vec![index],
                    denials,
                }),
            }
        }
        let fingerprint = fingerprint(&limits);
        let sole_schedule = sole_schedule(&limits, &members);
        Ok(Self {
            name: None,
            shadow: false,
            limits,
            members,
            fingerprint,
            sole_schedule,
            formerly: None,
            on_failure: None,
            share: OnceLock::new(),
            stretch: 0,
            stretched: OnceLock::new(),
            unstretched: None,
        })
    }

    /// Lets the limits stretch: so many percent more are admitted, marked, of requests that are charged under
    /// [`Self::stretched`]. Both keep one state, so that what was admitted beyond the limits while there was room counts
    /// once there is none.
    ///
    /// # Errors
    ///
    /// Names `elastic`: refuses what a soft allowance of so much would be refused, and limits that count what they
    /// deny, which would forget what lies beyond them.
    pub fn stretching(mut self, percent: u32) -> Result<Self, LimitError> {
        if self
            .members
            .iter()
            .any(|member| member.denials != Denials::Forgotten)
        {
            let problem = "does not go with count_denied; remove one of the two";
            return Err(LimitError::new("elastic", problem));
        }
        self.stretch = percent;
        self.share = OnceLock::new();
        self.stretched = OnceLock::new();
        if percent > 0 {
            let stretched = self.build_stretched();
            let stretched = stretched.map_err(|error| LimitError::new("elastic", error.problem))?;
            self.stretched = OnceLock::from(Arc::new(stretched));
        }
        Ok(self)
    }

    /// The limits where there is room, if they stretch.
    #[must_use]
    pub fn stretched(&self) -> Option<&Self> {
        let build = || Arc::new(self.build_stretched().unwrap_or_else(|_| self.clone()));
        (self.stretch > 0).then(|| &**self.stretched.get_or_init(build))
    }

    /// By how many percent the limits stretch where there is room.
    #[must_use]
    pub fn stretch(&self) -> u32 {
        self.stretch
    }

    /// Whether these are stretched limits.
    #[must_use]
    pub fn is_stretched(&self) -> bool {
        self.unstretched.is_some()
    }

    /// Gives the limits their rule's name.
    #[must_use]
    pub fn named(mut self, rule: &str) -> Self {
        self.name = Some(rule.into());
        self.stretched = OnceLock::new();
        self
    }

    /// Lets the limits count and report but never deny.
    #[must_use]
    pub fn in_shadow(mut self, shadow: bool) -> Self {
        self.shadow = shadow;
        self.share = OnceLock::new();
        self.stretched = OnceLock::new();
        self
    }

    /// Lets `policy` answer while the store is out of reach; `None` leaves that to the store.
    #[must_use]
    pub fn failing(mut self, policy: Option<OnFailure>) -> Self {
        self.on_failure = policy;
        self.stretched = OnceLock::new();
        self
    }

    /// Makes these limits the successors of `old`: a key whose state was left under `old` keeps what it has
    /// spent when it is next charged under the new numbers.
    ///
    /// Limits are matched by algorithm and order: the second fixed window takes over from the second fixed window.
    #[must_use]
    pub fn succeeding(mut self, old: &Arc<Self>) -> Self {
        self.formerly = Some(Arc::new(old.truncated(Self::MAX_FORMER)));
        self.share = OnceLock::new();
        self.stretched = OnceLock::new();
        self
    }

    /// The rule's name.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Whether the limits only count and report.
    #[must_use]
    pub fn shadow(&self) -> bool {
        self.shadow
    }

    /// What answers while the store is out of reach; `None` leaves that to the store.
    #[must_use]
    pub fn on_failure(&self) -> Option<OnFailure> {
        self.on_failure
    }

    /// What one node may admit by itself: every limit's share, built when it is first asked for.
    #[must_use]
    pub fn share(&self, share: Share) -> Arc<Self> {
        let (kept, limits) = self
            .share
            .get_or_init(|| (share, Arc::new(self.build_share(share))));
        match *kept == share {
            true => Arc::clone(limits),
            false => Arc::new(self.build_share(share)),
        }
    }

    /// The limits, in the order in which they were given.
    pub fn iter(&self) -> std::slice::Iter<'_, Limit> {
        self.limits.iter()
    }

    /// How many limits there are: at least one.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "there is always at least one")]
    pub fn len(&self) -> usize {
        self.limits.len()
    }

    /// Whether something is held until a receipt is settled, needed or not.
    #[must_use]
    pub fn holds_places(&self) -> bool {
        let mut members = self.members.iter();
        members.any(|member| matches!(member.kernel, Kernel::Lease(_)))
    }

    /// For how long a place is held that is not renewed: the shortest lease, where there is one.
    #[must_use]
    pub fn lease(&self) -> Option<Span> {
        let leases = self
            .limits
            .iter()
            .filter_map(|limit| match limit.algorithm() {
                Algorithm::Concurrency { lease, .. } => Some(*lease),
                _ => None,
            });
        leases.min()
    }

    /// A number that differs, almost surely, between limits that decide differently.
    pub(crate) fn fingerprint(&self) -> u32 {
        self.fingerprint
    }

    /// The kernels, each with the limits that it answers for.
    pub(crate) fn members(&self) -> &[Member] {
        &self.members
    }

    /// The schedule, where the rule is nothing but one, hard and enforced: the commonest case.
    #[inline]
    pub(crate) fn sole_schedule(&self) -> Option<&Schedule> {
        self.sole_schedule.as_ref().filter(|_| !self.shadow)
    }

    /// What is remembered of a key that was never seen.
    pub(crate) fn fresh(&self) -> Cell {
        match self.members.as_slice() {
            [member] => Cell::One(member.kernel.fresh()),
            members => Cell::Many(members.iter().map(|member| member.kernel.fresh()).collect()),
        }
    }

    /// Makes sure that `cell`, left under limits of `fingerprint`, is one that these limits know.
    #[inline]
    pub(crate) fn load(&self, cell: Cell, fingerprint: u32, now: Timestamp) -> Cell {
        if fingerprint == self.fingerprint && self.knows(&cell) {
            cell
        } else {
            self.adopt(cell, fingerprint, now)
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

    /// The same limits with a wider allowance. They know the states of these, and the other way round.
    fn build_stretched(&self) -> Result<Self, LimitError> {
        let wider = |limit: &Limit| {
            let percent = limit.soft_percent().saturating_add(self.stretch);
            limit.clone().with_soft_percent(percent)
        };
        let limits: Result<Vec<Limit>, _> = self.limits.iter().map(wider).collect();
        Ok(Self {
            name: self.name.clone(),
            shadow: self.shadow,
            fingerprint: self.fingerprint,
            formerly: self.formerly.clone(),
            on_failure: self.on_failure,
            unstretched: Some(Arc::new(Self {
                stretched: OnceLock::new(),
                ..self.clone()
            })),
            ..Self::new(limits?)?
        })
    }

    fn build_share(&self, share: Share) -> Self {
        if let Some(unstretched) = &self.unstretched {
            let scaled = unstretched.build_share(share);
            return scaled.build_stretched().unwrap_or(scaled);
        }
        let limits = self.limits.iter().map(|limit| share.of(limit)).collect();
        // A share of sound limits is as many sound limits.
        let scaled = Self::new(limits).unwrap_or_else(|_| self.clone());
        let scaled = Self {
            name: self.name.clone(),
            shadow: self.shadow,
            stretch: self.stretch,
            ..scaled
        };
        match &self.formerly {
            Some(old) => scaled.succeeding(&old.share(share)),
            None => scaled,
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

    /// Takes over what was left under other numbers.
    #[cold]
    fn adopt(&self, cell: Cell, fingerprint: u32, now: Timestamp) -> Cell {
        let former = self.former(fingerprint);
        let is_same = fingerprint == self.fingerprint;
        let kernels = self.members.iter().map(|member| &member.kernel);
        cell.taken_over(kernels, |kernel, index, state| {
            if is_same && kernel.knows(&state) {
                return state;
            }
            let left_by = former.and_then(|former| former.members.get(index));
            kernel.adopt(left_by.map(|member| &member.kernel), state, now)
        })
    }

    fn former(&self, fingerprint: u32) -> Option<&Self> {
        let mut limits = Some(self);
        while let Some(candidate) = limits {
            if candidate.fingerprint == fingerprint {
                return Some(candidate);
            }
            limits = candidate.formerly.as_deref();
        }
        None
    }

    /// A copy that remembers at most `generations` former sets, itself included, and nothing that was built from it, which would
    /// remember all of them.
    fn truncated(&self, generations: usize) -> Self {
        let formerly = self.formerly.as_ref().filter(|_| generations > 1);
        Self {
            formerly: formerly.map(|old| Arc::new(old.truncated(generations - 1))),
            share: OnceLock::new(),
            stretched: OnceLock::new(),
            ..self.clone()
        }
    }
}

/// The schedule that is all there is to decide, if its state always fits an entry.
fn sole_schedule(limits: &[Limit], members: &[Member]) -> Option<Schedule> {
    let ([limit], [member]) = (limits, members) else {
        return None;
    };
    let Kernel::Schedule(schedule) = &member.kernel else {
        return None;
    };
    let is_plain = limit.soft_allowance() == 0
        && member.denials == Denials::Forgotten
        && member.kernel.is_small();
    is_plain.then_some(*schedule)
}

fn fingerprint(limits: &[Limit]) -> u32 {
    // FNV-1a, written out: states outlive the process, and the next one may be of another compiler.
    let mut hash: u64 = 0xCBF2_9CE4_8422_2325;
    for limit in limits {
        for byte in format!("{limit:?}").bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3);
        }
    }
    // 28 bits are what stores elsewhere have room for.
    let folded = (hash ^ (hash << 32)) >> 36;
    u32::try_from(folded).unwrap_or(u32::MAX)
}
