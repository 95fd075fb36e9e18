"""A run on Kubernetes with dask's operator. pip install 'decodesim[dask]' dask-kubernetes"""

from dask_kubernetes.operator import KubeCluster, make_cluster_spec

import sim

IMAGE = "registry.example.org/decodesim:0.1.0"  # this very Python and decodesim[dask], installed with constraints.txt

if __name__ == "__main__":
    limits = {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"cpu": "1", "memory": "2Gi"}}
    command = ["dask", "worker", "--nthreads", "1"]
    spec = make_cluster_spec("decodesim", image=IMAGE, n_workers=32, worker_command=command, resources=limits)
    (scheduler,) = spec["spec"]["scheduler"]["spec"]["containers"]
    scheduler["args"][:1] = ["dask", "scheduler"]  # for the command `dask-scheduler`, which dask no longer has
    with KubeCluster(custom_cluster_spec=spec) as cluster:
        sim.run("ppd-forms", scheduler=cluster.scheduler_address, out="runs/forms", resume=True)
