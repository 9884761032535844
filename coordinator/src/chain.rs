//! The chain of commits: each names the one before it by hash, all are signed (rule 16).

use std::collections::VecDeque;

use skein_protocol::id::{Hash, NodeId, Version};
use skein_protocol::message::control::Commit;
use skein_protocol::sign::Signer;

use crate::machine::{COMMITS_KEPT, push_bounded};

/// The newest part of the chain.
#[derive(Clone, Debug, Default)]
pub(crate) struct Chain {
    tail: VecDeque<Commit>,
    head: Hash,
    version: Version,
}

impl Chain {
    /// The version that the newest commit makes.
    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// Hash of the newest commit.
    pub(crate) fn head(&self) -> Hash {
        self.head
    }

    /// The newest commits, oldest first.
    pub(crate) fn tail(&self) -> impl Iterator<Item = &Commit> {
        self.tail.iter()
    }

    /// Appends a commit that extends the chain.
    ///
    /// # Panics
    /// If it does not: the coordinator made or checked it.
    pub(crate) fn push(&mut self, commit: Commit) {
        assert_eq!(commit.previous, self.head, "a commit extends the chain");
        self.head = commit.hash();
        self.version = commit.fence.step.makes();
        push_bounded(&mut self.tail, commit, COMMITS_KEPT);
    }

    /// Goes back: the next commit is of step `base`, on a new timeline. The chain itself goes on.
    pub(crate) fn rewind(&mut self, base: Version) {
        self.version = base;
        self.tail.clear();
    }

    /// The part of `presented` that extends this chain and bears `signer`'s signature.
    pub(crate) fn extension(&self, presented: &[Commit], id: NodeId, signer: &dyn Signer) -> Vec<Commit> {
        let mut head = self.head;
        let mut version = self.version;
        let mut extension = Vec::new();
        for commit in presented {
            let hash = commit.hash();
            if commit.previous == head && commit.fence.step.runs_on() == version && signer.verify(id, &hash.0, &commit.signature) {
                (head, version) = (hash, commit.fence.step.makes());
                extension.push(commit.clone());
            }
        }
        extension
    }
}
