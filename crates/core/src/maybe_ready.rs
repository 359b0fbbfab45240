//! The type [`MaybeReady`]: either the result of an operation, or a future that returns the result.

use std::{
    convert::Infallible,
    future,
    marker::PhantomData,
    pin::Pin,
    task::{Context, Poll},
};

use pin_project_lite::pin_project;

/// The result of an operation that may have to wait for a remote store.
///
/// Synchronous code uses only a result that is [`Ready`](Self::Ready). Async code writes `.await`,
/// which does not suspend if the result is ready.
#[must_use = "a pending operation has no effect until it is awaited"]
#[derive(Debug)]
pub enum MaybeReady<T, F> {
    /// The operation is complete.
    Ready(T),
    /// The operation must wait for a remote store. Nothing is changed or sent until this future is
    /// first polled.
    Pending(F),
}

impl<T> MaybeReady<T, Never<T>> {
    /// Returns the result of an operation that never waits.
    #[inline]
    pub fn into_inner(self) -> T {
        match self {
            Self::Ready(result) => result,
            Self::Pending(Never { never, .. }) => match never {},
        }
    }
}

impl<T, F> MaybeReady<T, F> {
    /// Returns true if the operation is complete.
    #[must_use]
    #[inline]
    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Ready(_))
    }

    /// Returns the result if the operation is complete. If the operation is pending, returns `None`
    /// and drops the operation, which then has no effect.
    #[must_use]
    #[inline]
    pub fn ready(self) -> Option<T> {
        match self {
            Self::Ready(result) => Some(result),
            Self::Pending(_) => None,
        }
    }

    /// Applies `wrap` to the future if the operation is pending.
    #[inline]
    pub fn map_pending<G>(self, wrap: impl FnOnce(F) -> G) -> MaybeReady<T, G> {
        match self {
            Self::Ready(result) => MaybeReady::Ready(result),
            Self::Pending(future) => MaybeReady::Pending(wrap(future)),
        }
    }

    /// Moves the future of a pending operation to the heap. An async function that awaits the
    /// result then does not contain this future, so its own future is small and cheap to move.
    #[inline]
    pub fn boxed(self) -> MaybeReady<T, Pin<Box<F>>> {
        self.map_pending(Box::pin)
    }
}

impl<T, F: Future<Output = T>> MaybeReady<T, F> {
    /// Applies `convert` to the result: immediately if the result is ready, otherwise when the
    /// future completes.
    #[inline]
    pub fn map<U>(self, convert: impl FnOnce(T) -> U) -> MaybeReady<U, impl Future<Output = U>> {
        match self {
            Self::Ready(result) => MaybeReady::Ready(convert(result)),
            Self::Pending(future) => MaybeReady::Pending(async { convert(future.await) }),
        }
    }
}

impl<T, F: Future<Output = T>> IntoFuture for MaybeReady<T, F> {
    type Output = T;
    type IntoFuture = MaybeReadyFuture<T, F>;

    #[inline]
    fn into_future(self) -> Self::IntoFuture {
        let state = match self {
            Self::Ready(result) => MaybeReadyState::Ready {
                result: future::ready(result),
            },
            Self::Pending(future) => MaybeReadyState::Pending { future },
        };
        MaybeReadyFuture { state }
    }
}

pin_project! {
    /// The future of a [`MaybeReady`].
    #[must_use = "futures do nothing unless they are awaited"]
    #[derive(Debug)]
    pub struct MaybeReadyFuture<T, F> {
        #[pin]
        state: MaybeReadyState<T, F>,
    }
}

pin_project! {
    #[project = StateProjection]
    #[derive(Debug)]
    enum MaybeReadyState<T, F> {
        Ready { result: future::Ready<T> },
        Pending { #[pin] future: F },
    }
}

impl<T, F: Future<Output = T>> Future for MaybeReadyFuture<T, F> {
    type Output = T;

    #[inline]
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        match self.project().state.project() {
            StateProjection::Ready { result } => Pin::new(result).poll(context),
            StateProjection::Pending { future } => future.poll(context),
        }
    }
}

/// The future of an operation that never waits. This type has no values, because such an operation
/// is always ready.
#[derive(Debug)]
pub struct Never<T> {
    never: Infallible,
    result: PhantomData<fn() -> T>,
}

impl<T> Future for Never<T> {
    type Output = T;

    #[inline]
    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<T> {
        match self.never {}
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, pin::pin, task::Waker};

    use super::*;

    fn poll<T>(result: impl IntoFuture<Output = T>) -> Poll<T> {
        pin!(result.into_future()).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_ready_result_does_not_suspend() {
        let result = || MaybeReady::<_, Never<_>>::Ready(7);
        assert!(result().is_ready());
        assert_eq!(result().ready(), Some(7));
        assert_eq!(result().into_inner(), 7);
        assert_eq!(size_of_val(&result()), size_of::<i32>());
        assert_eq!(poll(result()), Poll::Ready(7));
    }

    #[test]
    fn a_pending_operation_has_no_effect_until_it_is_polled() {
        let calls = Cell::new(0);
        let operation = || {
            MaybeReady::Pending(async {
                calls.set(calls.get() + 1);
                calls.get()
            })
        };
        assert!(!operation().is_ready());
        assert_eq!(operation().ready(), None);
        assert_eq!(calls.get(), 0);
        assert_eq!(poll(operation()), Poll::Ready(1));
        let never: MaybeReady<u8, _> = MaybeReady::Pending(future::pending());
        assert_eq!(poll(never), Poll::Pending);
    }

    #[test]
    fn a_result_is_converted_now_or_later() {
        let ready = MaybeReady::<_, Never<_>>::Ready(7);
        assert_eq!(ready.map(|result| result + 1).ready(), Some(8));
        let pending = MaybeReady::Pending(future::ready(7));
        let wrapped = pending.map_pending(async |result| 2 * result.await);
        assert_eq!(poll(wrapped.map(|result| result + 1)), Poll::Ready(15));
    }

    #[test]
    fn a_boxed_future_takes_no_space_in_the_caller() {
        let pending = || {
            MaybeReady::Pending(async {
                let large = [1_u8; 4_096];
                future::ready(()).await;
                large.iter().map(|byte| usize::from(*byte)).sum::<usize>()
            })
        };
        let awaiting = async || pending().boxed().await;
        assert!(size_of_val(&awaiting()) < 128);
        assert_eq!(poll(awaiting()), Poll::Ready(4_096));
    }
}
