//! The head of an answer, of whatever client.

use http::{HeaderMap, Response, StatusCode};

pub(crate) trait Head: Send {
    fn status(&self) -> StatusCode;

    fn headers(&self) -> &HeaderMap;
}

impl<B: Send> Head for Response<B> {
    fn status(&self) -> StatusCode {
        self.status()
    }

    fn headers(&self) -> &HeaderMap {
        self.headers()
    }
}
