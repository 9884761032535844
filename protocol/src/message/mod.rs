//! Everything anyone says. [`control`] goes between a node and the coordinator, [`data`] between nodes.

pub mod control;
pub mod data;
#[cfg(test)]
mod golden;

/// Wire versions that this build speaks, lowest and highest.
pub const VERSIONS: Versions = Versions { min: 1, max: 1 };

/// A range of wire versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode, serde::Serialize)]
pub struct Versions {
    /// The lowest.
    pub min: u16,
    /// The highest.
    pub max: u16,
}

impl Versions {
    /// The highest version that both speak.
    pub fn common(self, other: Self) -> Option<u16> {
        let highest = self.max.min(other.max);
        (highest >= self.min.max(other.min)).then_some(highest)
    }
}

impl std::fmt::Display for Versions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.min == self.max { write!(f, "{}", self.min) } else { write!(f, "{} to {}", self.min, self.max) }
    }
}
