//! mTLS identity: adds the client name from a client certificate to each request, as an entry that
//! rules can refer to.

use std::task::{Context, Poll};

use hyper::{Request, body::Incoming};
use tidegate_identity::Entries;
use tower_service::Service;

/// The name of the entry that contains the client name.
const NAME: &str = "tls.client";

/// A service that adds the client name to requests, if the client has presented a certificate.
#[derive(Clone)]
pub(super) struct MtlsService<S> {
    inner: S,
    entries: Option<Entries>,
}

impl<S> MtlsService<S> {
    /// Wraps `inner` for the requests of the client `name`.
    pub(super) fn new(name: Option<String>, inner: S) -> Self {
        let entries = name.map(|name| Entries::new().with(NAME, name));
        Self { inner, entries }
    }
}

impl<S: Service<Request<Incoming>>> Service<Request<Incoming>> for MtlsService<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Incoming>) -> Self::Future {
        if let Some(entries) = &self.entries {
            request.extensions_mut().insert(entries.clone());
        }
        self.inner.call(request)
    }
}
