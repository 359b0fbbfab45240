//! What Redis refuses although it can be reached: nothing in a connection that works would show it.

use std::sync::{Mutex, PoisonError};

use crate::StoreError;
use tidegate_core::{Span, Timestamp};

/// For how long a refusal is shown, and how long another is kept out of the log.
const SHOWN: Span = Span::from_secs(60);

/// The latest refusal.
#[derive(Debug, Default)]
pub(super) struct Refusals(Mutex<Option<Refusal>>);

#[derive(Debug)]
struct Refusal {
    at: Timestamp,
    logged_at: Timestamp,
    error: StoreError,
}

impl Refusals {
    /// Takes note of `error`, if somebody has to do something about it, and now and then puts it into the log. What
    /// is out of reach, or fails over, shows in the health of the servers.
    pub(super) fn note(&self, error: &StoreError, now: Timestamp) {
        if let StoreError::NotExecuted(_) | StoreError::Unknown(_) = error {
            return;
        }
        let mut latest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(refusal) = &mut *latest
            && refusal.error == *error
            && refusal.logged_at.after(SHOWN) > now
        {
            refusal.at = now;
            return;
        }
        let logged = latest.as_ref().map(|refusal| refusal.logged_at);
        let is_news = logged.is_none_or(|logged| logged.after(SHOWN) <= now);
        if is_news {
            tracing::warn!("{error}");
        }
        *latest = Some(Refusal {
            at: now,
            logged_at: logged.filter(|_| !is_news).unwrap_or(now),
            error: error.clone(),
        });
    }

    /// What was refused within the last minute.
    pub(super) fn latest(&self, now: Timestamp) -> Option<String> {
        let latest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let shown = latest
            .as_ref()
            .filter(|refusal| refusal.at.after(SHOWN) > now);
        shown.map(|refusal| refusal.error.to_string())
    }
}
