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

#[cfg(test)]
mod tests {
    use skein_protocol::id::{Fence, Step, Timeline};
    use skein_protocol::message::control::Scalars;
    use skein_protocol::sign::NullSigner;

    use super::*;

    const ME: NodeId = NodeId([0xc0; 32]);

    fn commit(step: u64, previous: Hash, loss: f32) -> Commit {
        let fence = Fence { timeline: Timeline(1), step: Step(step) };
        Commit { fence, previous, groups: Vec::new(), scalars: Scalars::default(), loss, signature: Vec::new() }
    }

    #[test]
    fn only_what_extends_the_chain_is_adopted() {
        let mut chain = Chain::default();
        let first = commit(0, Hash::default(), 1.0);
        let second = commit(1, first.hash(), 2.0);
        let third = commit(2, second.hash(), 3.0);
        chain.push(first.clone());
        // Known ones are passed over; a fork, and what is behind a gap, is not adopted.
        assert_eq!(chain.extension(&[first.clone(), second.clone(), third.clone()], ME, &NullSigner), [second.clone(), third.clone()]);
        assert_eq!(chain.extension(&[third], ME, &NullSigner), []);
        let fork = commit(1, commit(0, Hash::default(), 9.0).hash(), 2.0);
        assert_eq!(chain.extension(&[fork], ME, &NullSigner), []);
        let skips = commit(2, first.hash(), 2.0);
        assert_eq!(chain.extension(&[skips], ME, &NullSigner), []);
        chain.push(second);
        assert_eq!(chain.version(), Version(2));
    }

    #[test]
    fn what_another_signed_is_not_adopted() {
        struct Nobody;
        impl Signer for Nobody {
            fn sign(&self, _: &[u8]) -> Vec<u8> {
                Vec::new()
            }
            fn verify(&self, _: NodeId, _: &[u8], _: &[u8]) -> bool {
                false
            }
        }
        assert_eq!(Chain::default().extension(&[commit(0, Hash::default(), 1.0)], ME, &Nobody), []);
    }
}
