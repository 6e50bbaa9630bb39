"""Mistakes that type checkers must find; each line names what mypy and pyright call it."""

import numpy

import mpidist
import mpidist.optimizers as O
from mpidist import Trayner  # attr-defined reportAttributeAccessIssue
from mpidist.coordinators import RemoteValue  # import-not-found reportMissingImports
from mpidist.data import Datset  # attr-defined reportAttributeAccessIssue

strategy = mpidist.MirroredStrategie()  # attr-defined reportAttributeAccessIssue
strategy = mpidist.MirroredStrategy(["/cpu:0"], cross_device_op=None)  # call-arg reportCallIssue
strategy = mpidist.MultiWorkerMirroredStrategy(communication_options="ring")  # arg-type reportArgumentType
mpidist.Variable(None)  # arg-type reportArgumentType
mpidist.Variable([1.0], aggregaton="sum")  # call-arg reportCallIssue
w = mpidist.Variable([1.0])
w.asign([2.0])  # attr-defined reportAttributeAccessIssue
w.assign(None)  # arg-type reportArgumentType
w.shape.append(1)  # attr-defined reportAttributeAccessIssue
optimizer = O.Lamb(0.1)  # attr-defined reportAttributeAccessIssue
optimizer = O.SGD(0.1, momentun=0.9)  # call-arg reportCallIssue
optimizer = O.SGD(0.1, clipnorm="1")  # arg-type reportArgumentType
optimizer = O.AdamW(0.1, decay=0.1)  # call-arg reportCallIssue
optimizer.apply_gradients([(w, numpy.ones(1))])  # list-item reportArgumentType
optimizer.apply_gradient([(numpy.ones(1), w)])  # attr-defined reportAttributeAccessIssue
trainer = mpidist.Trainer(print, [w], optimizer, metrcs=["mse"])  # call-arg reportCallIssue
trainer = mpidist.Trainer(print, [w], "sgd")  # arg-type reportArgumentType
trainer = mpidist.Trainer(print, [w])  # call-arg reportCallIssue
trainer.fit(numpy.ones(3), epoch=2)  # call-arg reportCallIssue
trainer.fit(numpy.ones(3), callbacks=mpidist.callbacks.EarlyStopping())  # arg-type reportArgumentType
trainer.stop_trainin = True  # attr-defined reportAttributeAccessIssue
mpidist.callbacks.EarlyStopping(monitr="loss")  # call-arg reportCallIssue
mpidist.callbacks.ProgbarLogger()  # attr-defined reportAttributeAccessIssue
mpidist.metrics.F1Score()  # attr-defined reportAttributeAccessIssue
mpidist.data.Dataset.from_csv("a", colums=["b"])  # call-arg reportCallIssue
mpidist.data.Dataset.range(4).batched(2)  # attr-defined reportAttributeAccessIssue
mpidist.data.Dataset.range(4).batch("2")  # arg-type reportArgumentType
mpidist.get_replica_context().allreduce("sum", 1)  # union-attr reportAttributeAccessIssue
mpidist.ReplicaContext(strategy, 0).strategy.num_replicas  # attr-defined reportAttributeAccessIssue
mpidist.get_strategy().num_replicas  # attr-defined reportAttributeAccessIssue
mpidist.ReduceOp.AVERAGE  # attr-defined reportAttributeAccessIssue
mpidist.coordinator.ClusterCoordinator(strategy).sched(print)  # attr-defined reportAttributeAccessIssue
mpidist.cluster_resolver.SlurmClusterResolver(job=1)  # call-arg reportCallIssue
mpidist.errors.LauchError  # attr-defined reportAttributeAccessIssue
mpidist.experimental.rpc  # attr-defined reportAttributeAccessIssue
mpidist.tpu.experimental.Topologie  # attr-defined reportAttributeAccessIssue
mpidist.config.set_visible_devices  # attr-defined reportAttributeAccessIssue
mpidist.testing.run_rank  # attr-defined reportAttributeAccessIssue
mpidist.parameter_server.Asynchronus  # attr-defined reportAttributeAccessIssue
mpidist.keras  # attr-defined reportAttributeAccessIssue
length: int = strategy.run(lambda: "text")  # assignment reportAssignmentType
text: str = strategy.num_replicas_in_sync  # assignment reportAssignmentType
