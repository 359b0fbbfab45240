//! The example of a client, against the real server.

use std::fs;

use crate::support::{Server, repository};

#[path = "../../../client/examples/client/calls.rs"]
mod calls;

/// It prints what its page says that it does. The one wait in it is the one that the server asks for, and part of what is shown.
#[tokio::test]
async fn the_client_comes_back_when_it_may() {
    let server = Server::quickstart();
    let printed = calls::all(&format!("http://{}", server.http))
        .await
        .unwrap();
    let page = fs::read_to_string(repository().join("examples/client/README.md")).unwrap();
    assert!(
        page.contains(&format!("```text\n{printed}```")),
        "{printed}"
    );
}
