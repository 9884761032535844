//! Memory that runs out, on the toy model: what can be had again is freed, and the numbers stay.

use std::rc::Rc;

use super::*;
use crate::engine::WorkKey;
use crate::engine::toy::{self, Toy};

const MICROBATCHES: u32 = 6;

/// The toy model on a device that holds so many graphs.
struct Small {
    toy: Toy,
    room: usize,
    graphs: Rc<()>,
}

impl Compute for Small {
    type Graph = (<Toy as Compute>::Graph, Rc<()>);
    type Gradients = <Toy as Compute>::Gradients;

    fn forward(&mut self, weights: &Weights<'_>, work: Work, input: Option<&[f32]>) -> Result<Forward<Self::Graph>, EngineError> {
        if Rc::strong_count(&self.graphs) > self.room {
            return Err(EngineError::OutOfMemory(format!("{} graphs", self.room)));
        }
        let Forward { graph, output, loss } = self.toy.forward(weights, work, input)?;
        Ok(Forward { graph: (graph, Rc::clone(&self.graphs)), output, loss })
    }

    fn input_gradient(&mut self, graph: &Self::Graph, gradient: Option<&[f32]>) -> Result<Vec<f32>, EngineError> {
        self.toy.input_gradient(&graph.0, gradient)
    }

    fn backward(&mut self, graph: Self::Graph, gradient: Option<&[f32]>) -> Result<Backward<Self::Gradients>, EngineError> {
        self.toy.backward(graph.0, gradient)
    }
}

/// All microbatches forward, then all backward; the sums, and how many tasks failed.
fn step(room: usize) -> (Vec<Vec<f32>>, usize) {
    let config = toy::config(2, true, MICROBATCHES, 10);
    let structure = toy::structure(&config);
    let whole = structure.whole();
    let mut core = Core::new(Small { toy: Toy::new(&config, Box::new(toy::ToySamples::new(&config))), room, graphs: Rc::new(()) }, &config, structure);
    let groups = core.structure().group_ids().collect();
    core.run(Task::Draw { groups });
    let keys: Vec<WorkKey> = (0..MICROBATCHES).map(|index| WorkKey { step: Step(0), microbatch: Microbatch(index), span: whole }).collect();
    let mut failed = 0;
    let mut run = |core: &mut Core<Small>, task| failed += usize::from(matches!(core.run(task), Outcome::Failed { .. }));
    for key in &keys {
        run(&mut core, Task::Forward { key: *key, input: None, encode: Codec::None, keep_graph: true });
    }
    for key in keys {
        run(&mut core, Task::Backward { key, input: None, gradient: None, encode: None });
        let uses = core.structure().uses_of(whole);
        let sums = uses.iter().map(|one| Use(one as u16)).map(|one| (one, SumId { boot: 1, count: u64::from(core.structure().group_of(one).0) }));
        let sums = sums.collect();
        run(&mut core, Task::Add { key, sums });
    }
    let values = core.sums.values().map(|sum| if let sums::Values::Float(values) = &sum.values { values.to_vec() } else { Vec::new() });
    (values.collect(), failed)
}

#[test]
fn a_device_with_little_room_computes_again_what_it_cannot_keep() {
    let (all, _) = step(usize::MAX);
    for room in 1..=MICROBATCHES as usize {
        let (sums, failed) = step(room);
        assert_eq!(failed, 0, "room for {room} graphs");
        assert!(sums == all, "room for {room} graphs: other sums");
    }
    assert!(step(0).1 > 0, "a device without any room fails");
}
