//! How much an upstream bears: who gets a place there, who is shed, and whether there is room for more.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use http::{Extensions, request::Parts};
use tidegate_core::{LimitError, Timestamp, adaptive::AdaptiveSettings};
use tidegate_http::{Clock, Gauge, Held, LimiterLayer, Load, Room};

use super::gate::ProxyGate;
use crate::config;

/// What an upstream bears, learnt.
#[derive(Debug)]
pub(super) struct Capacity {
    gauge: Arc<Gauge>,
    settings: AdaptiveSettings,
    classes: Box<[Class]>,
    room: Box<[Room]>,
    /// The entry that tells rules whether there is room.
    pub(super) entry: Box<str>,
}

/// Requests that are worth the same.
#[derive(Debug)]
struct Class {
    settings: config::Class,
    shed: Arc<AtomicU64>,
}

/// The class of a request, in its extensions: it was found out before the limits were asked.
#[derive(Clone, Copy, Debug)]
struct Classed(usize);

impl Capacity {
    /// As `settings` have it for `upstream`; with the counts, the places and the knowledge of the `previous` one. What is in
    /// force changes with [`Self::put_in_force`].
    ///
    /// # Errors
    ///
    /// Numbers that cannot work, which the configuration has none of.
    pub(super) fn succeeding(
        settings: &config::Adaptive,
        upstream: &config::Upstream,
        previous: Option<&Self>,
        clock: &Clock,
    ) -> Result<Self, LimitError> {
        let gauge = match previous {
            Some(previous) => Arc::clone(&previous.gauge),
            None => Arc::new(Gauge::new(settings.settings, clock.clone())?),
        };
        let class = |settings: &config::Class| {
            let known = previous.iter().flat_map(|previous| &previous.classes);
            let mut known = known.filter(|known| known.settings.name == settings.name);
            Class {
                shed: known
                    .next()
                    .map(|known| Arc::clone(&known.shed))
                    .unwrap_or_default(),
                settings: settings.clone(),
            }
        };
        Ok(Self {
            gauge,
            settings: settings.settings,
            classes: settings.classes.iter().map(class).collect(),
            room: settings.room.as_slice().into(),
            entry: upstream.room_entry().into(),
        })
    }

    /// Lets its numbers hold from now on, for those who are on their way too.
    pub(super) fn put_in_force(&self) {
        if let Err(error) = self.gauge.change(self.settings) {
            tracing::error!("kept the old numbers of `adaptive`: {error}");
        }
    }

    /// Whether there is room for more than the usual.
    pub(super) fn has_room(&self) -> bool {
        self.room.iter().all(|room| self.gauge.has(*room))
    }

    /// Finds out the class of the request with this head, as `layer` sees it, and leaves it there; false, and one more is shed, if
    /// there is no place for it.
    pub(super) fn look(
        &self,
        head: &mut Parts,
        layer: &LimiterLayer<ProxyGate>,
        now: Timestamp,
    ) -> bool {
        let classes = self.classes.iter();
        let mut classes = classes.map(|class| &class.settings.when).enumerate();
        let found = classes.find(|(_, when)| when.is_always() || layer.holds(when, head, now));
        let Some((at, class)) = found.and_then(|(at, _)| Some((at, self.classes.get(at)?))) else {
            return true;
        };
        let has_place = self.gauge.has_place(class.settings.share);
        if has_place {
            head.extensions.insert(Classed(at));
        } else {
            class.shed.fetch_add(1, Ordering::Relaxed);
        }
        has_place
    }

    /// A place for the request with these extensions, if there is one.
    pub(super) fn enter(&self, extensions: &mut Extensions) -> Option<Held> {
        let last = self.classes.last();
        let class = extensions
            .remove()
            .and_then(|Classed(at)| self.classes.get(at))
            .or(last)?;
        let place = self.gauge.enter(class.settings.share);
        if place.is_none() {
            class.shed.fetch_add(1, Ordering::Relaxed);
        }
        place
    }

    pub(super) fn load(&self) -> Load {
        self.gauge.load()
    }

    /// How many were shed, by the name of their class.
    pub(super) fn shed(&self) -> impl Iterator<Item = (&str, u64)> {
        self.classes.iter().map(|class| {
            let shed = class.shed.load(Ordering::Relaxed);
            (&*class.settings.name, shed)
        })
    }
}
