"""A run on Kubernetes with dask's operator. pip install 'decodesim[dask]' dask-kubernetes"""

from dask_kubernetes.operator import KubeCluster

import sim

IMAGE = "registry.example.org/decodesim:0.1.0"  # this very Python and decodesim[dask], installed with constraints.txt

if __name__ == "__main__":
    command = ["dask-worker", "--nthreads", "1"]
    limits = {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"cpu": "1", "memory": "2Gi"}}
    with KubeCluster(name="decodesim", image=IMAGE, n_workers=32, worker_command=command, resources=limits) as cluster:
        sim.run("ppd-forms", scheduler=cluster.scheduler_address, out="runs/forms", resume=True)
