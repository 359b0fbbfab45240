//! The action for a request whose decision is pending.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tidegate::rate_limiter::CancelSignal;
use tokio::runtime::Handle;

use super::action::Action;

/// A pending decision, with the action that follows from it.
///
/// A remote store may charge a request after the request was cancelled. If the late charge can be
/// refunded, the decision is completed in the background, on the request's runtime, and the charge
/// is then refunded. If a cancelled request is waiting for a concurrency slot, it leaves its queue
/// immediately.
pub(super) struct PendingAction {
    action: Option<Pin<Box<dyn Future<Output = Action> + Send>>>,
    reserves: bool,
    signal: Arc<CancelSignal>,
    /// The tokio runtime on which the request was first polled.
    runtime: Option<Handle>,
}

impl PendingAction {
    pub(super) fn new(
        action: impl Future<Output = Action> + Send + 'static,
        reserves: bool,
        signal: Arc<CancelSignal>,
    ) -> Self {
        Self {
            action: Some(Box::pin(action)),
            reserves,
            signal,
            runtime: None,
        }
    }

    /// # Panics
    ///
    /// Panics if polled after completion.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Action> {
        if self.reserves && self.runtime.is_none() {
            self.runtime = Handle::try_current().ok();
        }
        let action = ready!(
            self.action
                .as_mut()
                .expect("polled after completion")
                .as_mut()
                .poll(context)
        );
        self.action = None;
        Poll::Ready(action)
    }
}

impl Drop for PendingAction {
    fn drop(&mut self) {
        if let (Some(action), Some(runtime)) = (self.action.take(), self.runtime.take())
            && self.signal.cancel()
        {
            runtime.spawn(async move { drop(action.await) });
        }
    }
}
