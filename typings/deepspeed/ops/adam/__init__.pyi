from .cpu_adam import DeepSpeedCPUAdam as DeepSpeedCPUAdam
